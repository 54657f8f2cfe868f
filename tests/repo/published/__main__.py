"""Write the tables of committed results into README and docs."""

from tests.repo.published import write

write()
