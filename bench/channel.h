/*
 * channel - the layers between MQTT and the socket of one client: TLS, WebSocket, or both.
 *
 * It never blocks, accepts whole MQTT packets and returns MQTT bytes. A client without a channel uses plain TCP.
 * Compiled with -DNO_TLS it needs no OpenSSL and channel_setup(true, ...) fails.
 */
#ifndef CHANNEL_H
#define CHANNEL_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct channel;

/* Sets the layers of all channels of this process; false if they are not available. */
bool channel_setup(bool tls, bool websocket);

struct channel *channel_open(int fd);
void channel_close(struct channel *ch);

/* TLS and the WebSocket upgrade: 1 done, 0 call again when *want_write or when readable, -1 failed. */
int channel_handshake(struct channel *ch, bool *want_write);

/* Accepts all n bytes (whole packets); false: not all is in the socket, call again with n = 0 when it is writable. */
bool channel_write(struct channel *ch, const uint8_t *packets, size_t n);

/* Like recv(): MQTT bytes; 0 the end; -1 with errno, EAGAIN when there is nothing yet. */
ssize_t channel_read(struct channel *ch, uint8_t *buffer, size_t capacity);

/* Whether there are bytes to read that epoll does not report. */
bool channel_more(const struct channel *ch);

#endif
