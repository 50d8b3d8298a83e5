"""All ranks are alike where they must be, and differ where they must: the words and the means of it."""
