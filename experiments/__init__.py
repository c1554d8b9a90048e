"""Questions put to elastic depth, each a folder with its command, its results and its verdict."""
