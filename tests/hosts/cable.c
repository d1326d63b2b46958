/* Cables with a rate, a delay and losses.
 *
 *     cable NEAR0 FAR0 NEAR1 FAR1 ...
 *
 * joins the two network interfaces of each pair, as a cable does. The tests make the interfaces, in a network namespace
 * where nothing else uses them. A line on standard input sets both directions of a cable:
 *
 *     CABLE BITS_PER_SECOND DELAY_NS LOSS_PER_MILLION QUEUE_BYTES
 *
 * A rate of 0 is none. Each line is answered by one with the number of frames that each direction has lost since the
 * line before. The end of standard input is the end of the program.
 *
 * A frame leaves when those before it have left, takes the time of its bytes at the rate, and arrives after the delay.
 * What comes while more bytes than the queue has room for still wait to leave is lost, as at a full switch. The
 * kernel hands over several segments as one frame; they take the time of as many headers and gaps as they will have.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    CABLES = 16,
    FRAME = 1 << 17,          /* more than the largest frame */
    AT_ONCE = 64,             /* frames read from one interface before the others have their turn */
    BUFFER = 64 << 20,        /* bytes that the kernel keeps of an interface for this program */
    GAP = 24,                 /* bytes of preamble, checksum and gap of an Ethernet frame on the wire */
    SECOND = 1000000000
};

struct frame {
    struct frame *next;
    int64_t due;              /* when it arrives */
    size_t size;
    unsigned char bytes[];    /* the kernel's header, then Ethernet's */
};

struct direction {
    int from, to;
    int64_t rate, delay, loss, queue;
    int64_t idle;             /* when all that came before will have left */
    struct frame *first, **last;
    long lost;
};

static struct direction directions[2 * CABLES];
static int count;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * SECOND + time.tv_nsec;
}

static int interface(const char *name)
{
    int yes = 1, buffer = BUFFER;
    struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
    int fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    address.sll_ifindex = (int)if_nametoindex(name);
    if (fd < 0 || !address.sll_ifindex
        || setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &yes, sizeof yes)
        || setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &yes, sizeof yes)
        || setsockopt(fd, SOL_PACKET, PACKET_QDISC_BYPASS, &yes, sizeof yes)
        || setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &buffer, sizeof buffer)
        || setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &buffer, sizeof buffer)
        || bind(fd, (struct sockaddr *)&address, sizeof address))
        die(name);
    return fd;
}

/* Bytes on the wire, and how many segments they are. */
static int64_t wire(const unsigned char *bytes, size_t size, int *segments)
{
    const struct virtio_net_hdr *header = (const void *)bytes;
    int64_t payload = (int64_t)(size - sizeof *header) - header->hdr_len;

    *segments = 1;
    if (header->gso_type != VIRTIO_NET_HDR_GSO_NONE && header->gso_size)
        *segments = (int)((payload + header->gso_size - 1) / header->gso_size);
    return (int64_t)(size - sizeof *header) + (*segments - 1) * (int64_t)header->hdr_len + *segments * (int64_t)GAP;
}

static void enter(struct direction *way, const unsigned char *bytes, size_t size)
{
    int segments;
    int64_t length = wire(bytes, size, &segments), time = now();
    int64_t leaves = way->idle > time ? way->idle : time;
    struct frame *frame;

    while (segments-- > 0)
        if (random() % 1000000 < way->loss) {
            way->lost++;
            return;
        }
    if (way->rate) {
        if ((leaves - time) * (double)way->rate / 8 / SECOND > way->queue) {
            way->lost++;
            return;
        }
        leaves += (int64_t)(length * 8.0 * SECOND / way->rate);
        way->idle = leaves;
    }
    if (!(frame = malloc(sizeof *frame + size)))
        die("memory");
    frame->next = NULL;
    frame->due = leaves + way->delay;
    frame->size = size;
    memcpy(frame->bytes, bytes, size);
    *way->last = frame;
    way->last = &frame->next;
}

/* Let arrive what is due; return when the next frame is, or `next` if that is before. */
static int64_t deliver(struct direction *way, int64_t next)
{
    struct frame *frame;

    while ((frame = way->first) && frame->due <= now()) {
        /* An interface that is down, or has no room, loses it. */
        if (write(way->to, frame->bytes, frame->size) < 0 && errno != ENETDOWN && errno != ENXIO && errno != ENOBUFS
            && errno != EAGAIN)
            die("write");
        if (!(way->first = frame->next))
            way->last = &way->first;
        free(frame);
    }
    return frame && frame->due < next ? frame->due : next;
}

static void set(char *line)
{
    int cable;
    long long rate, delay, loss, queue;

    if (sscanf(line, "%d %lld %lld %lld %lld", &cable, &rate, &delay, &loss, &queue) != 5 || cable < 0
        || 2 * cable >= count) {
        fprintf(stderr, "cable: what is %s", line);
        exit(1);
    }
    for (struct direction *way = directions + 2 * cable; way < directions + 2 * cable + 2; way++) {
        way->rate = rate;
        way->delay = delay;
        way->loss = loss;
        way->queue = queue;
        printf("%ld ", way->lost);
        way->lost = 0;
    }
    printf("\n");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static unsigned char bytes[FRAME];
    static char line[256];
    struct pollfd polled[2 * CABLES + 1];
    size_t read_of_line = 0;

    if (argc < 3 || argc % 2 == 0 || argc > 2 * CABLES + 1) {
        fprintf(stderr, "cable: give it pairs of interfaces, at most %d\n", CABLES);
        return 2;
    }
    prctl(PR_SET_TIMERSLACK, 1);
    count = argc - 1;
    for (int way = 0; way < count; way++) {
        directions[way].from = interface(argv[way + 1]);
        directions[way].last = &directions[way].first;
        polled[way] = (struct pollfd){directions[way].from, POLLIN, 0};
    }
    for (int way = 0; way < count; way++)
        directions[way].to = directions[way ^ 1].from;
    polled[count] = (struct pollfd){STDIN_FILENO, POLLIN, 0};
    for (;;) {
        int64_t next = now() + SECOND, left;
        struct timespec time;

        for (int way = 0; way < count; way++)
            next = deliver(&directions[way], next);
        left = next - now();
        time = (struct timespec){left > 0 ? left / SECOND : 0, left > 0 ? left % SECOND : 0};
        if (ppoll(polled, (nfds_t)count + 1, &time, NULL) < 0)
            die("ppoll");
        if (polled[count].revents) {
            if (read(STDIN_FILENO, line + read_of_line, 1) != 1)
                return 0;
            if (line[read_of_line++] == '\n' || read_of_line == sizeof line - 1) {
                line[read_of_line] = 0;
                set(line);
                read_of_line = 0;
            }
        }
        for (int way = 0; way < count; way++)
            for (int times = 0; polled[way].revents && times < AT_ONCE; times++) {
                ssize_t size = read(directions[way].from, bytes, sizeof bytes);
                if (size < (ssize_t)sizeof(struct virtio_net_hdr))
                    break;  /* nothing there any more, or the interface is down */
                enter(&directions[way], bytes, (size_t)size);
            }
    }
}
