/* Parking and waking, with a store buffer per process: no wake-up is lost, and nobody sleeps for the dead.
 *
 * Stores go into the buffer of their process and reach memory later: in their order (x86-TSO, Intel SDM vol. 3, 9.2), or
 * with -DARM in any order but that of stores to the same place, while two loads without a fence between them may change
 * places. A full fence waits for the buffer to be empty. A ring of a bell does, too: write(2) to an eventfd takes the
 * kernel's lock, which whoever is woken takes after it. With -DTWIN, a fence is what the Python twin has on Arm: it keeps
 * stores in order and loads in order, but lets a load pass a store; then a sleep ends by itself (RECHECK_S).
 *
 *     step here       C (ring/_native.c)                  Python
 *     publish, tell   publish, readers_parked             ring/_portable.py WriterCore.commit, put_many; memory_fence
 *     ring_reader     -                                   queue/local/roster.py Roster.ring_bells; lifeline/bell.py Bell
 *     park            -                                   wait/poller.py Poller._sleep, _sleep_in_place;
 *                                                         wait/blocking.py BlockingPoller._sleep
 *     release         finish, writer_parked               ReaderCore.release, give_back, take_many
 *     can_go_on       -                                   ring/cursors.py RingReader.writer_can_go_on, RingWriter.want;
 *                                                         queue/local/waker.py WriterWaker.wake
 *     woken by end    -                                   lifeline/listener.py, dialer.py (end of file), Roster.gone
 *
 * -DREADERS_SLEEP: the writer publishes MESSAGES, BATCH of them with one fence, a reader sleeps for each; the writer may be
 * killed before any step. Else: the writer sleeps until both readers have finished with message 1, though it has waited
 * for message 2 before and given that up; reader 1 may be killed.
 *
 * Property: no deadlock. Whoever sleeps has been rung, or nobody owes him anything.
 */

#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef BATCH
#define BATCH 1
#endif
#define B 4

byte mem[6];
#define PUBLISHED 0        /* READERS_SLEEP: how many messages */
#define R_PARKED 1
#define W_PARKED 2
#define WANTED 3           /* which message the parked writer waits for */
#define FLAG 4             /* and 5: reader 0 and 1 have read message 1 */

byte place[12], value[12];  /* the buffers of three processes */
bit after[12];             /* whether there was a fence before this store */
byte held[3];
bit fenced[3];
bit bell[2];               /* 0: the reader's, 1: the writer's */
bit dead[3];
bit kill;

inline store(p, a, v) { atomic { held[p] < B; place[(p) * B + held[p]] = a; value[(p) * B + held[p]] = v; after[(p) * B + held[p]] = (held[p] > 0 && fenced[p]); fenced[p] = 0; held[p]++ } }
inline load(p, a, x) {
    d_step {
        x = mem[a]; j = 0;
        do
        :: j < held[p] && place[(p) * B + j] == a -> x = value[(p) * B + j]; j++
        :: j < held[p] && place[(p) * B + j] != a -> j++
        :: j >= held[p] -> break
        od;
        j = 0
    }
}
#ifdef TWIN
inline fence(p) { fenced[p] = 1 }
#else
inline fence(p) { held[p] == 0 }
#endif
inline ring(p, b) { atomic { held[p] == 0; bell[b] = 1 } }

/* Memory: takes what is in the buffers, sooner or later. */
inline take_out(p, k) {
    d_step {
        mem[place[(p) * B + k]] = value[(p) * B + k];
        j = k;
        do
        :: j + 1 < held[p] -> place[(p) * B + j] = place[(p) * B + j + 1]; value[(p) * B + j] = value[(p) * B + j + 1]; 
            after[(p) * B + j] = after[(p) * B + j + 1]; j++
        :: else -> break
        od;
        place[(p) * B + j] = 0; value[(p) * B + j] = 0; after[(p) * B + j] = 0; held[p]--; j = 0;
        after[(p) * B] = 0
    }
}
active proctype memory() {
    byte j;
end: do
    :: held[0] > 0 -> take_out(0, 0)
    :: held[1] > 0 -> take_out(1, 0)
    :: held[2] > 0 -> take_out(2, 0)
#ifdef ARM
    :: held[0] > 1 && place[0] != place[1] && !after[1] -> take_out(0, 1)
    :: held[1] > 1 && place[B] != place[B + 1] && !after[B + 1] -> take_out(1, 1)
    :: held[2] > 1 && place[2 * B] != place[2 * B + 1] && !after[2 * B + 1] -> take_out(2, 1)
#endif
    od
}

#ifdef READERS_SLEEP

active proctype writer() {
    byte sent, parked, j;
    {
    skip;
    do
    :: sent < MESSAGES ->
        do                                           /* publish */
        :: sent < MESSAGES -> sent++; store(0, PUBLISHED, sent);
            if :: sent % BATCH == 0 -> break :: else fi
        :: sent == MESSAGES -> break
        od;
#ifndef NO_FENCE_AFTER_PUBLISHING
        fence(0);
#endif
        load(0, R_PARKED, parked);                   /* tell */
        if
        :: parked ->
#ifdef RING_FIRST
            ring(0, 0); store(0, R_PARKED, 0)
#else
            store(0, R_PARKED, 0);                   /* ring_reader: one ring is enough until it wakes */
            ring(0, 0)
#endif
        :: else
        fi
    :: sent == MESSAGES -> break
    od
    } unless { kill };
    if
    :: kill -> atomic { held[0] == 0; dead[0] = 1 }  /* the kernel closes its socket after its last store */
    :: !kill && sent == MESSAGES                     /* it lives on and has nothing more to say */
    fi
}

active proctype killer() { if :: kill = 1 :: skip fi }

active proctype reader() {
    byte have, there, j;
    bit end_of_file;
    do
    :: have == MESSAGES -> break
    :: have < MESSAGES ->
        load(1, PUBLISHED, there);
        if
        :: there > have -> have = there
        :: there <= have && end_of_file -> break     /* the last look came after the end of file */
        :: there <= have && !end_of_file ->
            do                                       /* park */
            :: store(1, R_PARKED, 1);
#ifndef NO_FENCE_AFTER_PARKING
                fence(1);
#endif
#ifndef NO_LOOK_AFTER_PARKING
                load(1, PUBLISHED, there);
                if :: there > have -> break :: else fi;
#endif
#ifdef DRAIN_AFTER_LOOKING
                bell[0] = 0;
#endif
                if
                :: bell[0] == 1 -> bell[0] = 0
#ifndef NO_END_OF_FILE
                :: dead[0] -> end_of_file = 1; break
#endif
#ifdef TWIN
#ifndef NO_RECHECK
                :: true                              /* the timer */
#endif
#endif
                fi;
#ifdef NO_LOOK_AFTER_PARKING
                break
#endif
            od;
            store(1, R_PARKED, 0)
        fi
    od;
    assert(!end_of_file || have == mem[PUBLISHED])   /* what a dead writer has published was read */
}

#else

bit read_killed;

active proctype writer() {
    byte mine, other, j;
    d_step { mem[WANTED] = 2 };                      /* from a wait that was given up */
    store(0, WANTED, 1);                             /* want */
#ifndef NO_FENCE_AFTER_WANTING
    fence(0);
#endif
    do                                               /* park */
    :: store(0, W_PARKED, 1);
#ifndef NO_FENCE_AFTER_PARKING
        fence(0);
#endif
#ifndef NO_LOOK_AFTER_PARKING
        load(0, FLAG, mine);
        load(0, FLAG + 1, other);
        if :: mine && (other || read_killed) -> break :: else fi;
#endif
        if
        :: bell[1] == 1 -> bell[1] = 0
#ifndef NO_END_OF_FILE
        :: dead[2] && !read_killed -> read_killed = 1; store(0, FLAG + 1, 1)   /* gone: evicted, its flags are set */
#endif
#ifdef TWIN
#ifndef NO_RECHECK
        :: true
#endif
#endif
        fi;
#ifdef NO_LOOK_AFTER_PARKING
        load(0, FLAG, mine);
        load(0, FLAG + 1, other);
        if :: mine && (other || read_killed) -> break :: else fi;
#endif
    od;
    store(0, W_PARKED, 0)
}

proctype reader(byte r) {
    byte parked, wanted, mine, other, j;
    {
    store(1 + r, FLAG + r, 1);                       /* release */
#ifndef NO_FENCE_AFTER_RELEASING
    fence(1 + r);
#endif
    load(1 + r, W_PARKED, parked);
    if
    :: parked ->
#if defined(ARM) && defined(NO_FENCE_IN_CAN_GO_ON)
        load(1 + r, WANTED, wanted);                 /* can_go_on: the two loads have changed places */
        load(1 + r, W_PARKED, parked);
#else
        load(1 + r, W_PARKED, parked);               /* can_go_on */
        load(1 + r, WANTED, wanted);
#endif
        load(1 + r, FLAG, mine);
        load(1 + r, FLAG + 1, other);
        if
        :: parked && wanted == 1 && mine && other ->
#ifdef NO_RING
            store(1 + r, W_PARKED, 0)
#else
            store(1 + r, W_PARKED, 0);
            ring(1 + r, 1)
#endif
        :: else
        fi
    :: else
    fi
    } unless { r == 1 && kill };
    if
    :: r == 1 && kill -> atomic { held[2] == 0; dead[2] = 1 }
    :: else
    fi
}

active proctype killer() { if :: kill = 1 :: skip fi }
init { atomic { run reader(0); run reader(1) } }
#endif
