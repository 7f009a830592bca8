"""``aioshm demo``: a writer and its readers, every message checked; with ``--engines``, a front end and its engines.

* ``command.py``: the options, and one run from beginning to end.
* ``crew.py``: the processes; starts them, hears them, ends them.
* ``worker.py``: what runs in each of them; ``orders.py``: what they and the crew tell each other.
* ``script.py``: what is sent, and how it is checked; ``source.py``: the text; ``blocks.py``: the tensors.
* ``ends.py``: sends or receives the script, and measures it.
* ``display.py``: progress and results.
* ``engines_command.py``: one run with ``--engines``; ``engines.py``: a front end, from the start of its engines to the
  death of one; ``teller.py``: what the engines run; ``engines_display.py``: what is shown of it.
* ``facts.py``, ``loops.py``: what all of these need.
"""
