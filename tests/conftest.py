"""One thread a process: tests run in parallel, and threads that wait for one another would fight for cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
