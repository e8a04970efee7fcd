"""Teachers of a run: who teaches what, their engines, and the scores they give."""
