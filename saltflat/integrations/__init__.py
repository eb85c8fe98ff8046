"""Watching a training, in a loop of your own or in that of a host.

:class:`Monitor` is for hand-written loops. What other libraries need is in files of their own, which import them:
``saltflat.integrations.lightning`` and ``saltflat.integrations.huggingface``.
"""

from saltflat.integrations.loggers import JsonLines, Logger, MLflow, TensorBoard, WandB
from saltflat.integrations.monitor import Monitor
from saltflat.integrations.record import MonitorWarning, Record, Table

__all__ = ["JsonLines", "Logger", "MLflow", "Monitor", "MonitorWarning", "Record", "Table", "TensorBoard", "WandB"]
