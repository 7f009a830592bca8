/* Overflow segments: a descriptor passes before the marker that names its segment, whatever becomes of the writer.
 *
 * One writer, one reader, a ring of two slots, M messages that do not fit a chunk; either process may be killed before any
 * step. The socket takes CAP descriptors; what it does not take waits in the writer's outbox.
 *
 *     step here       queue/local/overflow.py                      lifeline/
 *     fitting         OverflowSegments.reserve, _free, put, mark
 *     hand_over       OverflowSegments.hand_over                       listener.py Peer.hand_over, _empty_outbox
 *     marker          pack_marker; readers.py LocalReaders.put
 *     look            PassedSegments.body, arrived                 dialer.py Lifeline._readable
 *     view, drop      PassedSegments.view, finished; PassedSegment.view, unlock (viewed: the lock)
 *     wait            source.py RingSource.on_descriptor, lost
 *
 * A newcomer may ask for history while a lender writes to a segment that is used again: OverflowSegments.is_gone (MAY_OFFER).
 *
 * Properties: a body is whole and that of its message, also for as long as the program views it, and for a newcomer; what a dead
 * writer has published can be read, unless the reader left its socket full; nobody waits for ever.
 */
#define M 4
#define CAP 1
chan sock = [CAP] of { byte };
byte marker[2], head[M], tail[M], used_for[M], outbox[M];
byte n_outbox, n_segments, published, read, have, viewed;
bit overfull, gone, lost_reader, kill_w, kill_r;

inline empty_outbox() {
    atomic { n_outbox > 0 && nfull(sock); sock!outbox[0];
        outbox[0] = outbox[1]; outbox[1] = outbox[2]; outbox[2] = outbox[3]; outbox[3] = 0; n_outbox-- }
}
inline hand_over(s) {
    atomic {
        if
        :: n_outbox == 0 && nfull(sock) -> sock!s                                /* -PAST_OUTBOX */
        :: n_outbox > 0 || full(sock) -> outbox[n_outbox] = s; n_outbox++; overfull = 1 /* -PAST_OUTBOX */
        /* +PAST_OUTBOX: :: nfull(sock) -> sock!s */
        /* +PAST_OUTBOX: :: full(sock) -> outbox[n_outbox] = s; n_outbox++; overfull = 1 */
        fi
    }
}
#define FREE(k) (k < n_segments && used_for[k] < read)                           /* -REUSE_EARLY */
/* +REUSE_EARLY: #define FREE(k) (k < n_segments) */
#define NO_MESSAGE 255
#define MAY_OFFER(k) (k < n_segments && used_for[k] != NO_MESSAGE)
#define WHOLE(k) (!MAY_OFFER(k) || (head[k] == used_for[k] && tail[k] == used_for[k]))
active proctype writer() {
    byte m, s, seen; bit fresh, free0, free1;
    {
    do
    :: m < M && m - read < 2 ->
        /* +VIEWED_FIRST: seen = viewed; */
        atomic { free0 = FREE(0); free1 = FREE(1) }
        seen = viewed;                                                           /* -VIEWED_FIRST */
        if                                            /* fitting: one that is free, or a new one */
        :: free0 && !(seen & 1) -> s = 0
        :: free1 && !(seen & 2) -> s = 1
        :: n_segments < M -> atomic { s = n_segments; used_for[s] = NO_MESSAGE; n_segments++; fresh = 1 }
        fi;
        used_for[s] = NO_MESSAGE;                                                /* -KEEP_NUMBER */
        atomic { head[s] = m; assert(WHOLE(0) && WHOLE(1) && WHOLE(2) && WHOLE(3)) }
        tail[s] = m;
        used_for[s] = m;
        if :: fresh -> hand_over(s) :: else fi;                                  /* -MARKER_FIRST */
        marker[m % 2] = s;
        published = m + 1;                            /* marker */
        /* +MARKER_FIRST: if :: fresh -> hand_over(s) :: else fi; */
        atomic { m++; s = 0; fresh = 0; seen = 0; free0 = 0; free1 = 0 }
    :: n_outbox > 0 && nfull(sock) -> empty_outbox()
    :: lost_reader -> break                           /* evicted */
    :: m == M && read == M -> break
    od
    } unless { kill_w };
    if :: kill_w -> gone = 1 :: !kill_w fi
}
inline arrive() { atomic { sock?s; assert(s == have); have++; s = 0 } }
inline check_view() { assert(head[at] == msg); assert(tail[at] == msg) }
active proctype reader() {
    byte s, n, at, msg; bit views;
    {
    do
    :: read < M && published > read ->
        n = marker[read % 2];
        do
        :: n < have -> break
        :: n >= have && nempty(sock) -> arrive()      /* look */
        :: n >= have && empty(sock) && gone && empty(sock) ->
            assert(overfull); goto over                   /* PeerDied, "with the body of message" */
#ifdef NO_INTERRUPT
        :: n >= have && empty(sock) && !gone -> gone  /* nobody tells the waiting call of the descriptor */
#endif
        od;
        s = head[n];
        assert(s == read);
        s = tail[n];
        assert(s == read);
        if                                            /* view: an array that the program keeps */
        :: !views -> atomic { views = 1; at = n; msg = read };
            viewed = 1 << n                                                      /* -VIEW_LATE */
        :: skip
        fi;
        atomic { read++; s = 0; n = 0 };
        /* +VIEW_LATE: if :: views -> viewed = 1 << at :: else fi */
    :: views -> check_view(); views = 0; viewed = 0   /* drop */
    :: nempty(sock) -> arrive()
    :: read == M -> break
    :: gone && published == read -> break
    od
    } unless { kill_r };
over:
    if :: views && !kill_r -> check_view() :: else fi;
    if :: kill_r -> lost_reader = 1 :: else fi
}
active proctype killer() { if :: kill_w = 1 :: kill_r = 1 :: skip fi }
