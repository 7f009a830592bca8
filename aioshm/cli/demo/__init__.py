"""``aioshm demo``: a writer and its readers, every message checked.

* ``command.py``: the options, and one run from beginning to end.
* ``crew.py``: the processes; starts them, hears them, ends them.
* ``worker.py``: what runs in each of them; ``orders.py``: what they and the crew tell each other.
* ``script.py``: what is sent, and how it is checked; ``source.py``: the text; ``blocks.py``: the tensors.
* ``ends.py``: sends or receives the script, and measures it.
* ``display.py``: progress and results.
"""
