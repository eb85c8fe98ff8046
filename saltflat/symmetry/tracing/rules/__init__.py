"""How operations transform scales, one file per kind of operation.

    @rule("relu abs")
    def propagate_relu(call):
        return call.get_scale_ids(call.args[0])

Operations without a rule are assumed to fix all scales they involve, and are listed as obstacles.
"""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
