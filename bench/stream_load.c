/*
 * stream_load - subscribers of a stream, for bench/streams.py.
 *
 *   gcc -O2 -std=c11 -Wall -Wextra -o stream_load stream_load.c
 *   stream_load read  --port N --filter F [--start S] [--clients N] [--qos Q] [--version 4|5] --count N
 *   stream_load drain --port N --filter F [--clients N] [--version 4|5] [--spread N] --seconds S [--idle]
 *
 * read   until the clients together have received the payloads 0 to --count - 1, each the decimal number of its message.
 *        QoS 1 messages are acknowledged. Messages of a topic, whose last four characters are its number, must come in
 *        order. --start is the user property stream-offset of MQTT 5.0. The time begins with the SUBSCRIBEs.
 * drain  for --seconds, without looking at what arrives; a client that has got everything subscribes again. With --spread
 *        client i begins at offset N * i / clients (MQTT 5.0), so that no two of them read the same. With --idle the
 *        kernel runs this process only while a processor has nothing else to do.
 *
 * The result is one line of JSON. Exit status: 0 fine, 1 messages are missing, doubled or out of order, 2 it could not be run.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define TOPICS 10000
#define BUFFER (1u << 20)
#define QUIET_NS 200000000ull /* after which a draining client has got everything */

struct client {
    int fd;
    uint8_t *data; /* received and not handled */
    size_t length;
    uint64_t received, last; /* bytes, ns */
};

static const char *filter = "", *start = "";
static int port, clients = 1, qos, version = 4;
static bool idle;
static uint64_t count, spread;
static double seconds, stall = 10;

static struct client *all;
static uint8_t *seen; /* a bit for each number */
static int64_t last_of_topic[TOPICS];
static uint64_t distinct, doubled, misordered, foreign;

static void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("stream_load: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    exit(2);
}

static uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void send_all(int fd, const void *data, size_t size)
{
    const uint8_t *p = data;
    while (size) {
        ssize_t n = send(fd, p, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            die("send: %s", strerror(errno));
        p += n;
        size -= (size_t)n;
    }
}

static size_t put_text(uint8_t *p, const char *text)
{
    size_t n = strlen(text);
    p[0] = (uint8_t)(n >> 8);
    p[1] = (uint8_t)n;
    memcpy(p + 2, text, n);
    return n + 2;
}

static void send_packet(int fd, uint8_t first, const uint8_t *body, size_t size)
{
    uint8_t packet[1200];
    size_t n = 1, rest = size;
    packet[0] = first;
    do {
        packet[n++] = (uint8_t)(rest % 128 | (rest > 127 ? 128 : 0));
        rest /= 128;
    } while (rest);
    memcpy(packet + n, body, size);
    send_all(fd, packet, n + size);
}

static void subscribe(int fd, int number, bool again)
{
    char offset[32];
    uint8_t body[1024] = {0, 1};
    size_t n = 2;
    if (again) {
        if (version == 5)
            body[n++] = 0;
        n += put_text(body + n, filter);
        send_packet(fd, 0xa2, body, n);
        n = 2;
    }
    if (version == 5) {
        size_t at = n++;
        if (*start || spread) {
            snprintf(offset, sizeof offset, "offset:%" PRIu64, spread * (uint64_t)number / (uint64_t)clients);
            body[n++] = 0x26;
            n += put_text(body + n, "stream-offset");
            n += put_text(body + n, *start ? start : offset);
        }
        body[at] = (uint8_t)(n - at - 1);
    }
    n += put_text(body + n, filter);
    body[n++] = (uint8_t)qos;
    send_packet(fd, 0x82, body, n);
}

static void connect_client(struct client *c, int number)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    uint8_t body[128], answer[256];
    char id[32];
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(c->fd, (void *)&address, sizeof address))
        die("connect: %s", strerror(errno));
    size_t n = put_text(body, "MQTT");
    body[n++] = (uint8_t)version;
    body[n++] = 2;
    body[n++] = 0;
    body[n++] = 0;
    if (version == 5)
        body[n++] = 0;
    snprintf(id, sizeof id, "reader-%d-%d", getpid(), number);
    n += put_text(body + n, id);
    send_packet(c->fd, 0x10, body, n);
    if (recv(c->fd, answer, 2, MSG_WAITALL) != 2 || recv(c->fd, answer + 2, answer[1], MSG_WAITALL) != answer[1])
        die("no CONNACK");
    if (answer[3])
        die("CONNACK 0x%02x", answer[3]);
}

static void note(const uint8_t *topic, size_t topic_length, const uint8_t *payload, size_t length)
{
    uint64_t number = 0;
    unsigned topic_number = 0;
    size_t digits = length < 19 ? length : 19;
    for (size_t i = length - digits; i < length; i++)
        number = number * 10 + (payload[i] - '0');
    for (size_t i = topic_length < 4 ? 0 : topic_length - 4; i < topic_length; i++)
        topic_number = topic_number * 10 + (unsigned)(topic[i] - '0');
    if (number >= count || topic_number >= TOPICS) {
        foreign++;
        return;
    }
    if (seen[number >> 3] & 1 << (number & 7)) {
        doubled++;
        return;
    }
    seen[number >> 3] |= (uint8_t)(1 << (number & 7));
    distinct++;
    if ((int64_t)number < last_of_topic[topic_number])
        misordered++;
    last_of_topic[topic_number] = (int64_t)number;
}

/* Handle what a client received; returns false if the broker closed the connection. */
static bool handle(struct client *c)
{
    static uint8_t acks[BUFFER];
    size_t acked = 0, at = 0;
    ssize_t n = recv(c->fd, c->data + c->length, BUFFER - c->length, MSG_DONTWAIT);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    if (n == 0)
        return false;
    c->length += (size_t)n;
    c->received += (uint64_t)n;
    while (c->length - at >= 2) {
        size_t size = 0, width = 1;
        const uint8_t *p = c->data + at;
        for (int shift = 0;; shift += 7) {
            if (at + width >= c->length)
                goto incomplete;
            uint8_t byte = p[width++];
            size |= (size_t)(byte & 127) << shift;
            if (byte < 128)
                break;
        }
        if (c->length - at < width + size)
            break;
        uint8_t first = p[0];
        p += width;
        at += width + size;
        if (first >> 4 == 3) {
            size_t topic = (size_t)(p[0] << 8 | p[1]), body = 2 + topic;
            if (first & 6) {
                memcpy(acks + acked, "\x40\x02", 2);
                memcpy(acks + acked + 2, p + body, 2);
                acked += 4;
                body += 2;
            }
            if (version == 5) {
                size_t properties = 0;
                for (int shift = 0;; shift += 7) {
                    uint8_t byte = p[body++];
                    properties |= (size_t)(byte & 127) << shift;
                    if (byte < 128)
                        break;
                }
                body += properties;
            }
            note(p + 2, topic, p + body, size - body);
        } else if (first >> 4 == 9 && p[size - 1] >= 0x80) {
            die("SUBACK 0x%02x", p[size - 1]);
        } else if (first >> 4 == 14) {
            die("DISCONNECT 0x%02x", size ? p[0] : 0);
        }
    }
incomplete:
    memmove(c->data, c->data + at, c->length - at);
    c->length -= at;
    if (acked)
        send_all(c->fd, acks, acked);
    return true;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"port", 1, 0, 'p'}, {"filter", 1, 0, 'f'}, {"start", 1, 0, 's'}, {"clients", 1, 0, 'n'}, {"qos", 1, 0, 'q'},
        {"version", 1, 0, 'v'}, {"count", 1, 0, 'c'}, {"seconds", 1, 0, 't'}, {"idle", 0, 0, 'i'}, {"stall", 1, 0, 'w'},
        {"spread", 1, 0, 'd'}, {0}};
    bool drains = argc > 1 && !strcmp(argv[1], "drain");
    if (argc < 2 || (!drains && strcmp(argv[1], "read")))
        die("the first argument is read or drain");
    for (int option; (option = getopt_long(argc - 1, argv + 1, "", options, 0)) != -1;)
        switch (option) {
        case 'p': port = atoi(optarg); break;
        case 'f': filter = optarg; break;
        case 's': start = optarg; break;
        case 'n': clients = atoi(optarg); break;
        case 'q': qos = atoi(optarg); break;
        case 'v': version = atoi(optarg); break;
        case 'c': count = strtoull(optarg, 0, 10); break;
        case 't': seconds = atof(optarg); break;
        case 'w': stall = atof(optarg); break;
        case 'd': spread = strtoull(optarg, 0, 10); break;
        case 'i': idle = true; break;
        default: return 2;
        }
    if (drains && idle) {
        struct sched_param none = {0};
        if (sched_setscheduler(0, SCHED_IDLE, &none))
            die("SCHED_IDLE: %s", strerror(errno));
    }
    all = calloc((size_t)clients, sizeof *all);
    seen = calloc(count / 8 + 1, 1);
    for (int i = 0; i < TOPICS; i++)
        last_of_topic[i] = -1;
    int poll = epoll_create1(0);
    for (int i = 0; i < clients; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
        connect_client(&all[i], i);
        if (!drains)
            all[i].data = malloc(BUFFER);
        epoll_ctl(poll, EPOLL_CTL_ADD, all[i].fd, &event);
    }
    uint64_t begun = clock_ns(), now = begun, progress = begun;
    for (int i = 0; i < clients; i++) {
        subscribe(all[i].fd, i, false);
        all[i].last = begun;
    }
    while (drains ? now - begun < (uint64_t)(seconds * 1e9) : distinct < count && now - progress < (uint64_t)(stall * 1e9)) {
        struct epoll_event events[64];
        int n = epoll_wait(poll, events, 64, 50);
        uint64_t before = distinct + doubled;
        now = clock_ns();
        for (int i = 0; i < n; i++) {
            struct client *c = &all[events[i].data.u32];
            if (drains) {
                ssize_t size = recv(c->fd, 0, BUFFER, MSG_TRUNC | MSG_DONTWAIT); /* thrown away by the kernel */
                if (size == 0)
                    die("the broker closed the connection");
                if (size > 0) {
                    c->received += (uint64_t)size;
                    if (size > 16)
                        c->last = now;
                }
            } else if (!handle(c)) {
                die("the broker closed the connection");
            }
        }
        if (distinct + doubled != before)
            progress = now;
        for (int i = 0; drains && i < clients; i++)
            if (now - all[i].last > QUIET_NS) {
                subscribe(all[i].fd, i, true);
                all[i].last = now;
            }
    }
    double took = (double)(now - begun) / 1e9;
    uint64_t bytes = 0;
    for (int i = 0; i < clients; i++)
        bytes += all[i].received;
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    bool ok = drains ? bytes > 0 : distinct == count && !misordered && !foreign && !(qos == 0 && doubled);
    printf("{\"ok\":%s,\"seconds\":%.4f,\"mb_per_s\":%.1f,\"self_cpu_pct\":%.1f", ok ? "true" : "false", took,
           (double)bytes / 1e6 / took, cpu / took * 100);
    if (!drains)
        printf(",\"delivered\":%" PRIu64 ",\"lost\":%" PRIu64 ",\"dup\":%" PRIu64 ",\"misordered\":%" PRIu64 ",\"corrupt\":%" PRIu64
               ",\"delivered_per_s\":%.0f",
               distinct, count - distinct, doubled, misordered, foreign, (double)distinct / took);
    puts("}");
    return ok ? 0 : 1;
}
