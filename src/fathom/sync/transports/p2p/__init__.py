"""Weights written by those who hold them into the registered memory of those who need them: just the slices each needs.

receiving rank (`landing`)                              source rank (`sender`)
registers its tensors once
plans who sends which piece (`plan`)
ask: my memory, and where each piece goes  ---TCP--->   checks token and version
lets the fabric work                       <==fabric==  writes from its registered memory
unpacks what could not land in place       <---TCP----  done, or failed and why
"""
