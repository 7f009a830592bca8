"""``aioshm demo``: a writer and its readers, every message checked; with ``--engines``, a front end and its engines.

* ``command.py``: the options, and one run of either demo from beginning to end.
* ``processes.py``: the writer's and the readers' processes; ``ends.py``: sends or receives the script, and measures it.
* ``script.py``: what is sent, and how it is checked; ``source.py``: the text; ``blocks.py``: the tensors.
* ``engines.py``: a front end, from the start of its engines to the death of one; ``teller.py``: what the engines run.
* ``display.py``, ``engines_display.py``: progress and results of the two.
"""
