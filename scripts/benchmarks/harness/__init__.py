"""What compare.py is made of.

workloads.py: the work and the models; readings.py: one run of one engine; rounds.py: the engines in turn; machine.py:
what this machine could do at best; peers.py: other engines, each in a process of its own; fresh.py: memory and
start-up, in fresh processes; load.py: requests that arrive over time; report.py: JSON and tables; plots.py: pictures.
"""
