"""How many cases run."""

import os

# One in so many cases of each parametrised test and of each random draw. Not an option of pytest: tests start pytest on
# other folders.
EVERY = int(os.environ.get("MPJAX_EVERY", "1"))
