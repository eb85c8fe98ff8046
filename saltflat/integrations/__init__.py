"""Monitor flatness during training, in a hand-written loop or in a host library.

:class:`Monitor` is for hand-written loops. Support for other libraries is in modules that import them:
``saltflat.integrations.lightning`` and ``saltflat.integrations.huggingface``.
"""

from saltflat.integrations.loggers import JsonLines, Logger, MLflow, TensorBoard, WandB
from saltflat.integrations.monitor import Monitor
from saltflat.integrations.record import MonitorWarning, Record, Table

__all__ = ["JsonLines", "Logger", "MLflow", "Monitor", "MonitorWarning", "Record", "Table", "TensorBoard", "WandB"]
