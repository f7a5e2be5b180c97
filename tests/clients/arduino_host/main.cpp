// Runs the sketch SKETCH until it has ended its connection.
#include "WiFi.h"
#undef HOST  // of the API, a name of the sketch
#include SKETCH

Console Serial;
Station WiFi;

unsigned long millis() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000UL + now.tv_nsec / 1000000;
}
void delay(unsigned long ms) { usleep(ms * 1000); }

int main() {
  setup();
  while (!stopped || client.connected()) loop();
}
