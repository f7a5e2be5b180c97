#!/bin/sh
# Four simulated sensors for compose.yaml: a reading of each in every second.
set -eu
awk 'BEGIN {
  srand()
  for (;;) {
    for (n = 1; n <= 4; n++) {
      value[n] += rand() - 0.5 - value[n] / 50
      printf "{\"sensor\": %d, \"value\": %.3f}\n", n, 20 + value[n]
    }
    fflush()
    system("sleep 1")
  }
}' | mqttbroker pub -h "${1:-broker}" -p "${2:-1883}" -V 5 -q 1 -i sensors -t sensors/plant -l
