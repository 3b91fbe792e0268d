"""Random programs, and the properties that autocast must have on every one of them."""

from testing.random_programs.cases import Case as Case
from testing.random_programs.cases import cases as cases
from testing.random_programs.cases import numbered_case as numbered_case
from testing.random_programs.properties import Failure as Failure
from testing.random_programs.properties import Rejected as Rejected
from testing.random_programs.properties import Subject as Subject
from testing.random_programs.properties import check as check
