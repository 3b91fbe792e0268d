"""`find_nonfinite`: the first operation that makes an inf or NaN."""
