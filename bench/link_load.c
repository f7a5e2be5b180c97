/*
 * link_load - the load of many connection workers on the core, without the workers.
 *
 * It speaks the frames of mqttbroker/net/link_frames.py for the clients of --links workers, so that the CPU time of the
 * core is measured alone.  It waits on the Unix socket --socket PATH for the links; each comes from a process
 * "link_load --hand-over PATH NUMBER DESCRIPTOR", which the broker starts instead of a worker.
 *
 * The clients are --pairs publishers and as many subscribers, MQTT 3.1.1, each pair with a topic of its own and spread
 * over the links.  Every payload has a sequence number and the time; lost, doubled or reordered messages are errors.
 *
 *   --batch N           each link writes exactly N messages at a time; the next N when those were delivered (QoS 1: and
 *                       acknowledged) or, with --rate, when they are due.
 *   --rate R            messages per second over all links.
 *   --message-us U --turn-us T
 *                       each link writes as a worker does that needs T us per iteration of its loop and U us per message:
 *                       everything that became due since its last iteration began, when that one is over.
 *   --idle N            connect N more clients first, and measure the core's memory for each.
 *
 * At most --window deliveries and acknowledgements of a link are open.  The result is one line of JSON on stdout.  Exit status: 0 fine,
 * 1 messages were lost, doubled or reordered, 2 it could not be run.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { DATA = 1, TAKEN = 2, READY = 10, OPENED = 11, STATUS = 19, SETUP = 30, ACCEPTED = 32, END = 33, ABORT = 34, RELOAD = 35, PING = 37 };
enum { HEADER = 9, REPORTED = 65536, AT_ONCE = 1024, MAX_LINKS = 64, BUFFER = 4 << 20 };
#define NS 1000000000ull

struct link {
    int fd;
    uint8_t *in, *out;
    size_t in_len, out_len, out_sent;
    uint32_t next_pair;       /* of those whose publisher is here; they are link, link + links, ... */
    uint64_t free_at;         /* end of the current turn */
    double due, due_rate;     /* messages to send, and how many become due per ns */
    uint64_t due_at;          /* when due was computed */
    uint64_t open;            /* deliveries and acknowledgements that its publishers' messages wait for */
    uint64_t writes;
};

struct client { uint64_t unreported; };
struct pair { uint64_t sent, received; };
struct sample { uint64_t t, core_us, self_us; };

static struct {
    const char *path;
    uint32_t links, pairs, batch, window, idle;
    int qos, size;
    double rate, message_us, turn_us, duration;
} opt = {.links = 1, .pairs = 1000, .window = 8192, .size = 64, .duration = 1};

static struct link links[MAX_LINKS];
static struct client *clients;
static struct pair *pairs;
static pid_t core;
static bool publishing;
static uint64_t now, connacks, subacks, sent, delivered, acked, misordered, corrupt, closed;
static uint64_t buckets[1 << 16];     /* latencies by microsecond; the last one has all longer ones */

static void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "link_load: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    exit(2);
}

static uint64_t clock_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * NS + (uint64_t)ts.tv_nsec;
}

static struct sample sample(void)
{
    struct sample s = {.t = clock_ns()};
    clockid_t clock;
    struct timespec ts;
    struct rusage ru;
    if (clock_getcpuclockid(core, &clock) == 0 && clock_gettime(clock, &ts) == 0)
        s.core_us = (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000;
    getrusage(RUSAGE_SELF, &ru);
    s.self_us = (uint64_t)(ru.ru_utime.tv_sec + ru.ru_stime.tv_sec) * 1000000 +
                (uint64_t)(ru.ru_utime.tv_usec + ru.ru_stime.tv_usec);
    return s;
}

static double core_kib(void)
{
    char path[64], line[256];
    double kib = 0;
    snprintf(path, sizeof path, "/proc/%ld/status", (long)core);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, "VmRSS:", 6))
            kib = atof(line + 6);
    if (f)
        fclose(f);
    return kib;
}

/* ------------------------------------------------------------------ frames */

static void put32(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)(v >> 24), p[1] = (uint8_t)(v >> 16), p[2] = (uint8_t)(v >> 8), p[3] = (uint8_t)v;
}

static uint32_t get32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void frame(struct link *l, int kind, uint32_t number, const void *body, size_t len)
{
    if (l->out_len + HEADER + len > BUFFER)
        die("more than %d bytes wait for a link", BUFFER);
    uint8_t *p = l->out + l->out_len;
    p[0] = (uint8_t)kind;
    put32(p + 1, number);
    put32(p + 5, (uint32_t)len);
    memcpy(p + HEADER, body, len);
    l->out_len += HEADER + len;
}

static void flush(struct link *l)
{
    while (l->out_sent < l->out_len) {
        ssize_t n = write(l->fd, l->out + l->out_sent, l->out_len - l->out_sent);
        if (n < 0) {
            if (errno == EAGAIN)
                return;
            die("a link was closed");
        }
        l->out_sent += (size_t)n;
    }
    l->out_len = l->out_sent = 0;
}

/* ------------------------------------------------------------------- MQTT */

static uint32_t publisher(uint32_t pair) { return 2 * pair + 1; }
static uint32_t subscriber(uint32_t pair) { return 2 * pair + 2; }
static uint32_t link_of_publisher(uint32_t pair) { return pair % opt.links; }
static uint32_t link_of_subscriber(uint32_t pair) { return pair / opt.links % opt.links; }

/* A message was delivered or acknowledged. */
static void finished(uint32_t pair)
{
    links[link_of_publisher(pair)].open--;
}

static void publish(struct link *l, uint32_t pair)
{
    uint8_t packet[2048], *p = packet + 3;
    struct pair *pp = &pairs[pair];
    int topic = sprintf((char *)p + 2, "load/%" PRIu32, pair);
    p[0] = 0, p[1] = (uint8_t)topic;
    p += 2 + topic;
    if (opt.qos) {
        uint16_t id = (uint16_t)(pp->sent % 65535 + 1);
        *p++ = (uint8_t)(id >> 8), *p++ = (uint8_t)id;
    }
    memset(p, 'x', (size_t)opt.size);
    memcpy(p, &pp->sent, 8);
    memcpy(p + 8, &now, 8);
    p += opt.size;
    size_t left = (size_t)(p - packet - 3);
    uint8_t *begin = packet + (left < 128);     /* the length takes one byte or two */
    begin[0] = (uint8_t)(0x30 | opt.qos << 1);
    begin[1] = (uint8_t)(left < 128 ? left : left % 128 | 128);
    if (left >= 128)
        begin[2] = (uint8_t)(left / 128);
    frame(l, DATA, publisher(pair), begin, (size_t)(p - begin));
    pp->sent++;
    sent++;
    l->open += opt.qos ? 2 : 1;
}

static void received_publish(struct link *l, uint32_t number, const uint8_t *p, size_t len)
{
    uint32_t pair = (number - 2) / 2;
    size_t topic = (size_t)p[0] << 8 | p[1], head = 2 + topic + (opt.qos ? 2 : 0);
    uint64_t seq, stamp;
    if (number % 2 || pair >= opt.pairs || len != head + (size_t)opt.size) {
        corrupt++;
        return;
    }
    memcpy(&seq, p + head, 8);
    memcpy(&stamp, p + head + 8, 8);
    if (seq != pairs[pair].received)
        misordered++;
    pairs[pair].received++;
    delivered++;
    uint64_t us = (now - stamp) / 1000;
    buckets[us < 65535 ? us : 65535]++;
    if (opt.qos) {
        uint8_t ack[4] = {0x40, 2, p[2 + topic], p[3 + topic]};
        frame(l, DATA, number, ack, 4);
    }
    finished(pair);
}

static void received_packets(struct link *l, uint32_t number, const uint8_t *p, size_t len)
{
    clients[number].unreported += len;
    if (clients[number].unreported >= REPORTED) {
        uint8_t size[4];
        put32(size, (uint32_t)clients[number].unreported);
        frame(l, TAKEN, number, size, 4);
        clients[number].unreported = 0;
    }
    while (len >= 2) {
        size_t left = p[1] & 127, at = 2;
        if (p[1] & 128)
            left |= (size_t)p[at++] << 7;
        if (at + left > len)
            break;
        switch (p[0] >> 4) {
        case 2: connacks += p[at + 1] == 0; break;
        case 3: received_publish(l, number, p + at, left); break;
        case 4:
            acked++;
            finished((number - 1) / 2);
            break;
        case 9: subacks++; break;
        default: corrupt++;
        }
        p += at + left;
        len -= at + left;
    }
    corrupt += len > 0;
}

static void received(struct link *l, int kind, uint32_t number, const uint8_t *body, size_t len)
{
    if (kind == SETUP || kind == RELOAD)
        frame(l, READY, 0, "[]", 2);
    else if (kind == PING)
        frame(l, STATUS, 0, "0", 1);
    else if (kind == DATA && number)
        received_packets(l, number, body, len);
    else if (kind == END || kind == ABORT)
        closed++;
}

static void receive(struct link *l)
{
    ssize_t n = read(l->fd, l->in + l->in_len, BUFFER - l->in_len);
    if (n <= 0) {
        if (n < 0 && errno == EAGAIN)
            return;
        die("the broker closed a link");
    }
    now = clock_ns();
    l->in_len += (size_t)n;
    size_t at = 0;
    while (l->in_len - at >= HEADER) {
        const uint8_t *p = l->in + at;
        size_t len = get32(p + 5);
        if (len > l->in_len - at - HEADER)
            break;
        received(l, p[0], get32(p + 1), p + HEADER, len);
        at += HEADER + len;
    }
    memmove(l->in, l->in + at, l->in_len - at);
    l->in_len -= at;
}

/* ----------------------------------------------------------------- sending */

/* How many messages the link is to send now; sets the time when that has to be asked again. */
static uint32_t to_send(struct link *l, uint64_t *again)
{
    if (!publishing || l->out_sent)
        return 0;
    if (opt.rate <= 0)
        return l->open ? 0 : opt.batch;
    l->due += (double)(now - l->due_at) * l->due_rate;
    l->due_at = now;
    if (l->due > opt.window)
        l->due = opt.window;
    uint32_t least = opt.batch ? opt.batch : 1;
    if (now < l->free_at || l->due < least) {
        uint64_t at = l->due < least ? now + (uint64_t)((least - l->due) / l->due_rate) + 1 : now;
        at = at > l->free_at ? at : l->free_at;
        *again = at < *again ? at : *again;
        return 0;
    }
    uint32_t count = opt.batch ? opt.batch : (uint32_t)l->due;
    count = count > AT_ONCE ? AT_ONCE : count;
    return l->open + count > opt.window ? 0 : count;
}

static void turn(struct link *l, uint64_t *again)
{
    uint32_t count = to_send(l, again), index = (uint32_t)(l - links);
    if (count == 0)
        return;
    l->due -= count;
    l->free_at = now + (uint64_t)((opt.turn_us + count * opt.message_us) * 1e3);
    *again = opt.rate > 0 ? now : *again;
    for (uint32_t i = 0; i < count; i++) {
        publish(l, l->next_pair);
        l->next_pair += opt.links;
        if (l->next_pair >= opt.pairs)
            l->next_pair = index;
    }
    l->writes++;
}

/* Serve the links until a time, or until *count has reached a value. */
static bool run(uint64_t until, const uint64_t *count, uint64_t wanted)
{
    struct pollfd fds[MAX_LINKS];
    for (;;) {
        now = clock_ns();
        if (count && *count >= wanted)
            return true;
        if (now >= until)
            return false;
        uint64_t again = until;
        for (uint32_t i = 0; i < opt.links; i++) {
            turn(&links[i], &again);
            flush(&links[i]);
            fds[i] = (struct pollfd){links[i].fd, (short)(POLLIN | (links[i].out_len ? POLLOUT : 0)), 0};
        }
        uint64_t left = again > now ? again - now : 0;
        struct timespec ts = {(time_t)(left / NS), (long)(left % NS)};
        if (ppoll(fds, opt.links, &ts, NULL) < 0 && errno != EINTR)
            die("ppoll: %s", strerror(errno));
        for (uint32_t i = 0; i < opt.links; i++)
            if (fds[i].revents)
                receive(&links[i]);
    }
}

static void must_reach(const uint64_t *count, uint64_t wanted, const char *what)
{
    if (!run(clock_ns() + 60 * NS, count, wanted))
        die("%" PRIu64 " of %" PRIu64 " %s within 60 s", *count, wanted, what);
}

/* ------------------------------------------------------------------- setup */

static struct sockaddr_un address(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof a.sun_path)
        die("the path of the socket is too long");
    strcpy(a.sun_path, path);
    return a;
}

/* --hand-over: give the link to the generator, and end with the generator. */
static int hand_over(const char *path, int descriptor)
{
    struct sockaddr_un a = address(path);
    int s = socket(AF_UNIX, SOCK_STREAM, 0);
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec iov = {&byte, 1};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &descriptor, sizeof descriptor);
    if (connect(s, (struct sockaddr *)&a, sizeof a) < 0 || sendmsg(s, &m, 0) != 1)
        die("%s: %s", path, strerror(errno));
    close(descriptor);
    return read(s, &byte, 1) != 0;
}

static void take_links(void)
{
    struct sockaddr_un a = address(opt.path);
    int listening = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listening, (struct sockaddr *)&a, sizeof a) < 0 || listen(listening, MAX_LINKS) < 0)
        die("%s: %s", opt.path, strerror(errno));
    for (uint32_t i = 0; i < opt.links; i++) {
        char byte, control[CMSG_SPACE(sizeof(int))];
        struct iovec iov = {&byte, 1};
        struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        struct pollfd waiting = {listening, POLLIN, 0};
        if (poll(&waiting, 1, 60000) != 1)
            die("%" PRIu32 " of %" PRIu32 " links within 60 s", i, opt.links);
        int s = accept(listening, NULL, NULL);
        if (recvmsg(s, &m, 0) != 1 || CMSG_FIRSTHDR(&m) == NULL)
            die("no link was handed over");
        struct link *l = &links[i];
        memcpy(&l->fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(int));
        fcntl(l->fd, F_SETFL, O_NONBLOCK);
        l->in = malloc(BUFFER), l->out = malloc(BUFFER);
        l->next_pair = i;
        l->due_rate = opt.rate / opt.links / 1e9;
        struct ucred cred;     /* of the process that made the link */
        socklen_t size = sizeof cred;
        if (getsockopt(l->fd, SOL_SOCKET, SO_PEERCRED, &cred, &size) == 0)
            core = cred.pid;
    }
    close(listening);
}

static void open_client(struct link *l, uint32_t number)
{
    uint8_t packet[64];
    char opened[80];
    const char *format = "[0, \"127.0.0.1:%" PRIu32 "\", false, false, null]";
    frame(l, OPENED, number, opened, (size_t)sprintf(opened, format, 1024 + number % 60000));
    int name = sprintf((char *)packet + 14, "link-%" PRIu32, number);
    memcpy(packet, "\x10\0\0\4MQTT\4\2\0\0\0", 13);
    packet[1] = (uint8_t)(12 + name);
    packet[13] = (uint8_t)name;
    frame(l, DATA, number, packet, (size_t)(14 + name));
}

static void subscribe(struct link *l, uint32_t number, const char *prefix, uint32_t topic)
{
    uint8_t packet[64];
    int len = sprintf((char *)packet + 6, "%s/%" PRIu32, prefix, topic);
    memcpy(packet, "\x82\0\0\1\0", 5);
    packet[1] = (uint8_t)(5 + len);
    packet[5] = (uint8_t)len;
    packet[6 + len] = (uint8_t)opt.qos;
    frame(l, DATA, number, packet, (size_t)(7 + len));
}

/* Connect the clients from number low to number high - 1, 64 at a time; returns CPU us of the core for each. */
static double connect_clients(uint32_t low, uint32_t high)
{
    uint64_t before = connacks;
    struct sample a = sample();
    for (uint32_t n = low; n < high; n++) {
        uint32_t pair = (n - 1) / 2;
        uint32_t index = pair >= opt.pairs ? n % opt.links : n % 2 ? link_of_publisher(pair) : link_of_subscriber(pair);
        open_client(&links[index], n);
        if ((n - low) % 64 == 63 || n == high - 1)
            must_reach(&connacks, before + n - low + 1, "clients connected");
    }
    return high > low ? (double)(sample().core_us - a.core_us) / (high - low) : 0;
}

static double quantile(double share)
{
    uint64_t sum = 0, wanted = (uint64_t)((double)delivered * share);
    for (uint32_t us = 0; us < 1 << 16; us++)
        if ((sum += buckets[us]) > wanted)
            return us;
    return 0;
}

static void parse(int argc, char **argv)
{
    static const struct option known[] = {
        {"socket", 1, 0, 's'}, {"links", 1, 0, 'l'}, {"pairs", 1, 0, 'p'}, {"batch", 1, 0, 'b'}, {"window", 1, 0, 'w'},
        {"idle", 1, 0, 'i'}, {"qos", 1, 0, 'q'}, {"size", 1, 0, 'z'}, {"rate", 1, 0, 'r'}, {"message-us", 1, 0, 'm'},
        {"turn-us", 1, 0, 't'}, {"duration", 1, 0, 'd'}, {0, 0, 0, 0}};
    int o;
    while ((o = getopt_long(argc, argv, "", known, NULL)) != -1) {
        switch (o) {
        case 's': opt.path = optarg; break;
        case 'l': opt.links = (uint32_t)atol(optarg); break;
        case 'p': opt.pairs = (uint32_t)atol(optarg); break;
        case 'b': opt.batch = (uint32_t)atol(optarg); break;
        case 'w': opt.window = (uint32_t)atol(optarg); break;
        case 'i': opt.idle = (uint32_t)atol(optarg); break;
        case 'q': opt.qos = atoi(optarg); break;
        case 'z': opt.size = atoi(optarg); break;
        case 'r': opt.rate = atof(optarg); break;
        case 'm': opt.message_us = atof(optarg); break;
        case 't': opt.turn_us = atof(optarg); break;
        case 'd': opt.duration = atof(optarg); break;
        default: die("see the comment at the top of the source");
        }
    }
    if (!opt.path || opt.links < 1 || opt.links > MAX_LINKS || opt.pairs < opt.links || opt.size < 16 || opt.size > 1500 ||
        opt.qos < 0 || opt.qos > 1 || opt.batch > AT_ONCE || (opt.rate <= 0 && !opt.batch))
        die("see the comment at the top of the source");
}

int main(int argc, char **argv)
{
    if (argc == 5 && !strcmp(argv[1], "--hand-over"))
        return hand_over(argv[2], atoi(argv[4]));
    parse(argc, argv);
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    uint32_t numbers = 2 * opt.pairs + opt.idle + 1;
    clients = calloc(numbers, sizeof *clients);
    pairs = calloc(opt.pairs, sizeof *pairs);
    take_links();
    run(clock_ns() + NS / 2, NULL, 0);
    double kib = core_kib(), idle_us = connect_clients(2 * opt.pairs + 1, numbers);
    for (uint32_t n = 2 * opt.pairs + 1; n < numbers; n++) {
        subscribe(&links[n % opt.links], n, "idle", n);
        if (n % 64 == 0 || n == numbers - 1)
            must_reach(&subacks, n - 2 * opt.pairs, "subscriptions");
    }
    double idle_kib = opt.idle ? (core_kib() - kib) / opt.idle : 0;
    double connect_us = connect_clients(1, 2 * opt.pairs + 1);
    for (uint32_t i = 0; i < opt.pairs; i++) {
        subscribe(&links[link_of_subscriber(i)], subscriber(i), "load", i);
        if (i % 64 == 63 || i == opt.pairs - 1)
            must_reach(&subacks, opt.idle + i + 1, "subscriptions");
    }
    /* Every pair once, so that routes are built. */
    for (uint32_t i = 0; i < opt.pairs; i++) {
        publish(&links[link_of_publisher(i)], i);
        if (i % 64 == 63 || i == opt.pairs - 1)
            must_reach(&delivered, i + 1, "messages");
    }
    if (opt.qos)
        must_reach(&acked, sent, "acknowledgements");
    run(clock_ns() + NS / 5, NULL, 0);

    memset(buckets, 0, sizeof buckets);
    uint64_t before = delivered, written = sent, writes = 0;
    for (uint32_t i = 0; i < opt.links; i++)
        links[i].due_at = clock_ns(), links[i].due = 0, links[i].writes = 0;
    publishing = true;
    struct sample a = sample();
    run(a.t + (uint64_t)(opt.duration * 1e9), NULL, 0);
    publishing = false;
    struct sample b = sample();
    double messages = (double)(delivered - before), seconds = (double)(b.t - a.t) / 1e9;
    run(clock_ns() + 5 * NS, opt.qos ? &acked : &delivered, sent);
    for (uint32_t i = 0; i < opt.links; i++)
        writes += links[i].writes;
    bool ok = sent == delivered && (!opt.qos || acked == sent) && !misordered && !corrupt && !closed && messages > 0;
    printf("{\"links\":%" PRIu32 ",\"qos\":%d,\"size\":%d,\"published\":%" PRIu64 ",\"delivered\":%" PRIu64
           ",\"delivered_per_s\":%.1f,\"core_us_per_delivered\":%.3f,\"core_cpu_pct\":%.1f,\"self_cpu_pct\":%.1f",
           opt.links, opt.qos, opt.size, sent, delivered, messages / seconds,
           messages > 0 ? (double)(b.core_us - a.core_us) / messages : 0, (double)(b.core_us - a.core_us) / seconds / 1e4,
           (double)(b.self_us - a.self_us) / seconds / 1e4);
    printf(",\"messages_per_write\":%.2f,\"core_us_per_connect\":%.2f,\"latency_us\":{\"p50\":%.0f,\"p99\":%.0f}",
           writes ? (double)(sent - written) / (double)writes : 0, connect_us, quantile(.5), quantile(.99));
    if (opt.idle)
        printf(",\"idle_clients\":%" PRIu32 ",\"core_kib_per_client\":%.3f,\"core_us_per_idle_connect\":%.2f", opt.idle,
               idle_kib, idle_us);
    printf(",\"lost\":%" PRIu64 ",\"misordered\":%" PRIu64 ",\"corrupt\":%" PRIu64 ",\"disconnects\":%" PRIu64
           ",\"unacked\":%" PRIu64 ",\"ok\":%s}\n", sent > delivered ? sent - delivered : 0, misordered, corrupt, closed,
           opt.qos && sent > acked ? sent - acked : 0, ok ? "true" : "false");
    return ok ? 0 : 1;
}
