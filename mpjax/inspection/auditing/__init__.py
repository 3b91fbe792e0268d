"""`audit`: the precision of each operation of a program, from its trace alone."""
