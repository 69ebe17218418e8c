"""The exit codes of the commands."""

DONE = 0
FAILED = 1  # the run or the work failed, or Ctrl-C
WRONG = 2  # the configuration or the command is wrong; nothing was written or submitted
REFUSED = 3  # the site refused; Slurm's message is shown
AGAIN = 4  # only of `job conclude`: the ranks start again in the same job
