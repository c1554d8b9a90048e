"""Loop sampling: who shares a draw of the loop count, and what that does to the one-loop loss."""
