// A network that is always joined, and its TCP client.
#pragma once
#include <errno.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#undef INADDR_NONE

#include "Arduino.h"

enum { WL_CONNECTED = 3 };
struct Station {
  void begin(const char *, const char *) {}
  int status() { return WL_CONNECTED; }
};
extern Station WiFi;

class WiFiClient : public Client {
  int fd = -1;

 public:
  int connect(const char *host, uint16_t port) override {
    stop();
    addrinfo hints{}, *found;
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host, String(port).c_str(), &hints, &found)) return 0;
    fd = socket(AF_INET, SOCK_STREAM, 0);
    bool joined = !::connect(fd, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    if (!joined) stop();
    return joined;
  }
  int connect(IPAddress, uint16_t) override { return 0; }
  size_t write(uint8_t byte) override { return write(&byte, 1); }
  size_t write(const uint8_t *bytes, size_t count) override {
    ssize_t sent = fd < 0 ? -1 : send(fd, bytes, count, MSG_NOSIGNAL);
    return sent < 0 ? 0 : sent;
  }
  int available() override {
    char bytes[1024];
    ssize_t count = fd < 0 ? 0 : recv(fd, bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT);
    return count < 0 ? 0 : count;
  }
  int read(uint8_t *bytes, size_t count) override {
    return fd < 0 ? -1 : recv(fd, bytes, count, MSG_DONTWAIT);
  }
  int read() override {
    uint8_t byte;
    return read(&byte, 1) == 1 ? byte : -1;
  }
  int peek() override { return -1; }
  void flush() override {}
  void stop() override {
    if (fd >= 0) close(fd);
    fd = -1;
  }
  uint8_t connected() override {
    char byte;
    if (fd < 0) return 0;
    ssize_t count = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return count > 0 || (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
  }
  operator bool() override { return fd >= 0; }
};
