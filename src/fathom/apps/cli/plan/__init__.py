"""`fathom plan`: what a choice would cost, before it is made."""
