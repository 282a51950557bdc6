"""`rankmesh run` with real processes: what ranks get, what is shown, and that they live and die together."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Launch  # type: ignore[import-not-found]  # pytest finds it beside this file

from timing import scaled, wait_until
