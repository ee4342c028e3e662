"""Judge whether training runs are the same: read, align, judge, show.

``readers`` turn files of any known logger into a :class:`~mfsdp_cli.compare.run.Run`; ``align``
puts two series side by side by step (never by position); ``judge`` applies tolerances; ``report``,
``picture`` and ``document`` show the outcome. Nothing here knows torch.
"""
