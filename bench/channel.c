/* channel - see channel.h.  Each MQTT packet is a WebSocket frame of its own, masked, as client libraries send them. */
#define _GNU_SOURCE
#include "channel.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#ifndef NO_TLS
#include <openssl/ssl.h>
#else
typedef struct ssl SSL;
#endif

enum { SHAKE_TLS, SHAKE_UPGRADE, SHAKE_ANSWER, SHAKE_DONE };
enum { FRAME_CONTINUED = 0, FRAME_BINARY = 2, FRAME_CLOSE = 8, FRAME_PING = 9, FRAME_PONG = 10 };

struct channel {
    int fd, shake;
    SSL *ssl;
    uint8_t *out;                    /* framed bytes not yet written */
    size_t out_off, out_len, out_cap;
    uint8_t head[14];                /* of the frame that is being read */
    size_t head_len;
    uint64_t frame_left;             /* payload bytes of it still to come */
    char answer[1024];               /* of the HTTP server */
    size_t answer_len;
};

static bool with_websocket;
static uint32_t mask_state = 0x9e3779b9;

#ifndef NO_TLS
static SSL_CTX *context;

/* The result of an SSL_ call in the terms of send() and recv(). */
static ssize_t ssl_result(SSL *ssl, int n)
{
    if (n > 0)
        return n;
    int error = SSL_get_error(ssl, n);
    if (error == SSL_ERROR_ZERO_RETURN)
        return 0;
    errno = error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE ? EAGAIN : ECONNRESET;
    return -1;
}
#endif

bool channel_setup(bool tls, bool websocket)
{
    with_websocket = websocket;
    if (!tls)
        return true;
#ifdef NO_TLS
    return false;
#else
    context = SSL_CTX_new(TLS_client_method());
    if (!context)
        return false;
    SSL_CTX_set_verify(context, SSL_VERIFY_NONE, NULL);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    return true;
#endif
}

struct channel *channel_open(int fd)
{
    struct channel *ch = calloc(1, sizeof *ch);
    if (!ch)
        abort();
    ch->fd = fd;
    ch->shake = with_websocket ? SHAKE_UPGRADE : SHAKE_DONE;
#ifndef NO_TLS
    if (context) {
        ch->ssl = SSL_new(context);
        SSL_set_fd(ch->ssl, fd);
        SSL_set_connect_state(ch->ssl);
        ch->shake = SHAKE_TLS;
    }
#endif
    return ch;
}

void channel_close(struct channel *ch)
{
    if (!ch)
        return;
#ifndef NO_TLS
    SSL_free(ch->ssl);
#endif
    free(ch->out);
    free(ch);
}

static ssize_t raw_send(struct channel *ch, const uint8_t *p, size_t n)
{
#ifndef NO_TLS
    if (ch->ssl)
        return ssl_result(ch->ssl, SSL_write(ch->ssl, p, (int)n));
#endif
    return send(ch->fd, p, n, MSG_NOSIGNAL);
}

static ssize_t raw_recv(struct channel *ch, uint8_t *p, size_t n)
{
#ifndef NO_TLS
    if (ch->ssl)
        return ssl_result(ch->ssl, SSL_read(ch->ssl, p, (int)n));
#endif
    return recv(ch->fd, p, n, 0);
}

bool channel_more(const struct channel *ch)
{
#ifndef NO_TLS
    if (ch->ssl)
        return SSL_pending(ch->ssl) > 0;
#endif
    (void)ch;
    return false;
}

/* ------------------------------------------------------------------ writing */

static uint8_t *reserve(struct channel *ch, size_t n)
{
    if (ch->out_cap - ch->out_len < n) {
        memmove(ch->out, ch->out + ch->out_off, ch->out_len - ch->out_off);
        ch->out_len -= ch->out_off;
        ch->out_off = 0;
        size_t cap = ch->out_cap ? ch->out_cap : 1024;
        while (cap - ch->out_len < n)
            cap *= 2;
        ch->out = realloc(ch->out, cap);
        if (!ch->out)
            abort();
        ch->out_cap = cap;
    }
    return ch->out + ch->out_len;
}

static void add_bytes(struct channel *ch, const void *p, size_t n)
{
    memcpy(reserve(ch, n), p, n);
    ch->out_len += n;
}

static void add_frame(struct channel *ch, int opcode, const uint8_t *p, size_t n)
{
    uint8_t *b = reserve(ch, n + 14), *start = b;
    *b++ = (uint8_t)(0x80 | opcode);
    if (n < 126) {
        *b++ = (uint8_t)(0x80 | n);
    } else if (n < 65536) {
        *b++ = 0x80 | 126;
        *b++ = (uint8_t)(n >> 8);
        *b++ = (uint8_t)n;
    } else {
        *b++ = 0x80 | 127;
        for (int shift = 56; shift >= 0; shift -= 8)
            *b++ = (uint8_t)((uint64_t)n >> shift);
    }
    mask_state ^= mask_state << 13;
    mask_state ^= mask_state >> 17;
    mask_state ^= mask_state << 5;
    memcpy(b, &mask_state, 4);
    uint64_t mask = (uint64_t)mask_state << 32 | mask_state, word;
    uint8_t *to = b + 4;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        memcpy(&word, p + i, 8);
        word ^= mask;
        memcpy(to + i, &word, 8);
    }
    for (; i < n; i++)
        to[i] = p[i] ^ b[i & 3];
    ch->out_len += (size_t)(to + n - start);
}

static size_t packet_size(const uint8_t *p)
{
    size_t size = 0, n = 1;
    for (int shift = 0;; shift += 7) {
        size |= (size_t)(p[n] & 127) << shift;
        if (!(p[n++] & 128))
            return n + size;
    }
}

bool channel_write(struct channel *ch, const uint8_t *packets, size_t n)
{
    if (with_websocket) {
        for (size_t at = 0, size; at < n; at += size) {
            size = packet_size(packets + at);
            add_frame(ch, FRAME_BINARY, packets + at, size);
        }
    } else if (n) {
        add_bytes(ch, packets, n);
    }
    while (ch->out_off < ch->out_len) {
        ssize_t k = raw_send(ch, ch->out + ch->out_off, ch->out_len - ch->out_off);
        if (k > 0)
            ch->out_off += (size_t)k;
        else if (k < 0 && errno == EAGAIN)
            return false;
        else if (k == 0 || errno != EINTR)
            break;                   /* channel_read() reports the end */
    }
    ch->out_off = ch->out_len = 0;
    return true;
}

/* ------------------------------------------------------------------ reading */

/* How long the header of the current frame is, as far as it is known. */
static size_t head_size(const struct channel *ch)
{
    if (ch->head_len < 2)
        return 2;
    uint8_t n = ch->head[1] & 127;
    return n == 127 ? 10 : n == 126 ? 4 : 2;
}

static uint64_t frame_size(const struct channel *ch)
{
    uint8_t n = ch->head[1] & 127;
    uint64_t size = 0;
    if (n < 126)
        return n;
    for (size_t i = 2; i < head_size(ch); i++)
        size = size << 8 | ch->head[i];
    return size;
}

/* Removes frame headers from the received bytes, in place; returns the bytes of MQTT left, or -1 at a close frame. */
static ssize_t unframe(struct channel *ch, uint8_t *p, size_t n)
{
    size_t from = 0, to = 0;
    while (from < n) {
        if (ch->frame_left == 0) {
            ch->head[ch->head_len++] = p[from++];
            if (ch->head_len < head_size(ch))
                continue;
            ch->frame_left = frame_size(ch);
            if ((ch->head[0] & 15) == FRAME_CLOSE)
                return -1;
            if ((ch->head[0] & 15) == FRAME_PING)
                add_frame(ch, FRAME_PONG, NULL, 0);
        }
        size_t k = n - from < ch->frame_left ? n - from : (size_t)ch->frame_left;
        int opcode = ch->head[0] & 15;
        if (opcode == FRAME_BINARY || opcode == FRAME_CONTINUED) {
            memmove(p + to, p + from, k);
            to += k;
        }
        from += k;
        ch->frame_left -= k;
        if (ch->frame_left == 0)
            ch->head_len = 0;
    }
    return (ssize_t)to;
}

ssize_t channel_read(struct channel *ch, uint8_t *buffer, size_t capacity)
{
    size_t got = 0;
    ssize_t n;
    do {
        n = raw_recv(ch, buffer + got, capacity - got);
        if (n <= 0)
            break;
        ssize_t packets = with_websocket ? unframe(ch, buffer + got, (size_t)n) : n;
        if (packets < 0)
            return 0;
        got += (size_t)packets;
    } while (ch->ssl && got < capacity);
    if (got)
        return (ssize_t)got;
    if (n > 0) {                     /* a part of a frame's header only */
        errno = EAGAIN;
        return -1;
    }
    return n;
}

/* ---------------------------------------------------------------- handshake */

static int read_answer(struct channel *ch)
{
    ssize_t n = raw_recv(ch, (uint8_t *)ch->answer + ch->answer_len, sizeof ch->answer - 1 - ch->answer_len);
    if (n <= 0)
        return n < 0 && errno == EAGAIN ? 0 : -1;
    ch->answer_len += (size_t)n;
    ch->answer[ch->answer_len] = 0;
    if (!strstr(ch->answer, "\r\n\r\n"))
        return ch->answer_len < sizeof ch->answer - 1 ? 0 : -1;
    return strncmp(ch->answer, "HTTP/1.1 101", 12) ? -1 : 1;
}

int channel_handshake(struct channel *ch, bool *want_write)
{
    static const char request[] =
        "GET /mqtt HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: bXF0dF9sb2FkIGlzIG9uZQ==\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Protocol: mqtt\r\n\r\n";
    *want_write = false;
#ifndef NO_TLS
    if (ch->shake == SHAKE_TLS) {
        int n = SSL_do_handshake(ch->ssl);
        if (n != 1) {
            int error = SSL_get_error(ch->ssl, n);
            *want_write = error == SSL_ERROR_WANT_WRITE;
            return *want_write || error == SSL_ERROR_WANT_READ ? 0 : -1;
        }
        ch->shake = with_websocket ? SHAKE_UPGRADE : SHAKE_DONE;
    }
#endif
    if (ch->shake == SHAKE_UPGRADE) {
        size_t n = sizeof request - 1;
        if (raw_send(ch, (const uint8_t *)request, n) != (ssize_t)n)
            return -1;
        ch->shake = SHAKE_ANSWER;
    }
    if (ch->shake == SHAKE_ANSWER) {
        int answered = read_answer(ch);
        if (answered <= 0)
            return answered;
        ch->shake = SHAKE_DONE;
    }
    return 1;
}
