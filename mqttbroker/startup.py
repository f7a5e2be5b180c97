"""What a broker, or a node of a cluster, does before anything else, and how it ends with an error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from mqttbroker import config_check
from mqttbroker.admin.data_files import set_umask
from mqttbroker.config.load import ConfigError, log_warning
from mqttbroker.config.settings import Settings
from mqttbroker.logs import close, configure_log, file_problem

log = logging.getLogger("mqttbroker")


def begin(settings: Settings, warnings: Sequence[str]) -> bool:
    """Open the log and log the warnings, those of loading the settings first; false, with a line on stderr, if there is no log."""
    try:
        configure_log(settings.log)
    except OSError as error:
        close()
        print(file_problem(error, settings.log), file=sys.stderr)
        return False
    for text in warnings:
        log_warning(text)
    for text in config_check.warnings(settings):
        log.warning("event=configuration_warning reason=%s", text)
    set_umask(settings.data_mode)
    return True


def failed(error: Exception) -> int:
    """Close the log, and say the error behind it on stderr; returns the exit status."""
    close()
    if isinstance(error, ConfigError):
        print(error, file=sys.stderr)
        return 2
    print(f"mqttbroker: {error}", file=sys.stderr)
    return 1
