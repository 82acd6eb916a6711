#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The protocol of the peer transport against its model: Spin goes through every interleaving, and through broken protocols that
# it must refuse.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need spin g++ python3
exec "$(find_python)" "$ROOT/tests/model/check_meetings.py"
