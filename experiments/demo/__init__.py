"""The project's main point in ten minutes on two CPU cores."""
