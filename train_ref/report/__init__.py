"""What a run has to say: tables, figures and pages, for one run or for all of them."""
