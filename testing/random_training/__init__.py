"""Random training programs, and the properties that mpjax must have on every one of them."""

from testing.random_programs.properties import Failure as Failure
from testing.random_programs.properties import Rejected as Rejected
from testing.random_training.cases import Case as Case
from testing.random_training.cases import numbered_case as numbered_case
from testing.random_training.properties import check as check
