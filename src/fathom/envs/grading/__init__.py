"""Worker processes that grade under a deadline that really stops them."""

from fathom.envs.grading.grader import Grader

__all__ = ["Grader"]
