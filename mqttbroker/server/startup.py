"""What a broker, or a node of a cluster, does before anything else, and how it ends with an error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from mqttbroker.admin.data.files import set_umask
from mqttbroker.config.files import with_user
from mqttbroker.config.load import ConfigError, log_warning
from mqttbroker.config.settings import Settings
from mqttbroker.logs.output import close, configure_log, file_problem
from mqttbroker.server import config_check

log = logging.getLogger("mqttbroker")


def begin(settings: Settings, warnings: Sequence[str]) -> bool:
    """Open the log and log the warnings, those of loading the settings first; false, with a line on stderr, if there is no log."""
    try:
        configure_log(settings.log)
    except OSError as error:
        close()
        print(config_check.with_place(with_user(file_problem(error, settings.log)), settings), file=sys.stderr)
        return False
    for text in warnings:
        log_warning(text)
    for text in config_check.warnings(settings):
        log.warning("event=configuration_warning reason=%s", config_check.with_place(text, settings))
    set_umask(settings.data_mode)
    return True


def failed(error: Exception, settings: Settings) -> int:
    """Close the log, and say the error behind it on stderr, with the line that set the key; returns the exit status.

    It is 2 for an error of the configuration, which another start would have, too, and 1 for any other.
    """
    close()
    if isinstance(error, ConfigError):
        for problem in error.problems:
            print(config_check.with_place(problem, settings), file=sys.stderr)
        return 2
    reason = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        reason = f"{error.filename}: {error.strerror}"
    print(f"mqttbroker: {with_user(reason)}", file=sys.stderr)
    return 1
