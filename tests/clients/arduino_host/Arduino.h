// What a sketch uses of the ESP32's Arduino core, on POSIX: enough to run docs/examples/clients/arduino on this machine.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ArduinoAPI.h"
#include "Client.h"
#include "String.h"
using namespace arduino;

struct Console {
  void begin(unsigned long) {}
  void println(const String &text) {
    puts(text.c_str());
    fflush(stdout);
  }
};
extern Console Serial;
inline void configTime(long, int, const char *) {}
