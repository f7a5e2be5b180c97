"""External authenticators from the settings: the plug-in of each kind, and its terms."""

from __future__ import annotations

import json
from typing import Any

from mqttbroker.auth.external import ExternalTerms
from mqttbroker.auth.plugin_process import PluginSpec
from mqttbroker.config import settings as config
from mqttbroker.config.settings import Settings

EXTERNAL = ("http_callback", "plugin")


def spec_of(kind: str, settings: Settings) -> PluginSpec | None:
    """The plug-in of a kind; None if there is none in the settings."""
    if kind == "plugin":
        plugin = settings.plugin
        if plugin.object is None:
            return None
        path = None if plugin.path is None else str(plugin.path)
        return _spec(plugin, plugin.object, json.loads(plugin.options or "{}"), path)
    callback = settings.http_callback
    if callback.url is None:
        return None
    headers = dict(callback.headers)
    if callback.authorization is not None:
        headers["Authorization"] = callback.authorization
    options = {
        "url": callback.url,
        "body": dict(callback.body),
        "headers": headers,
        "cafile": None if callback.cafile is None else str(callback.cafile),
        "max_concurrent": callback.max_concurrent,
        "max_answer": callback.max_answer_bytes,
    }
    return _spec(callback, "mqttbroker.auth.http_callback:HttpCallback", options, None)


def terms_of(kind: str, settings: Settings) -> ExternalTerms:
    section: config.ExternalAuthenticator = settings.plugin if kind == "plugin" else settings.http_callback
    return ExternalTerms(
        section.max_concurrent,
        settings.logins.max_waiting,
        settings.limits.max_total_connect_bytes,
        section.max_wait,
        section.cache_ttl,
        section.cache_bytes,
    )


def _spec(section: config.ExternalAuthenticator, plugin: str, options: dict[str, Any], path: str | None) -> PluginSpec:
    return PluginSpec(plugin, path, options, section.timeout, section.start_timeout, section.max_memory)
