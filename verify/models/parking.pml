/* Parking and waking, with a store buffer per process: no wake-up is lost, and nobody sleeps for the dead.
 *
 * Stores go into the buffer of their process and reach memory later: in their order (x86-TSO, Intel SDM vol. 3, 9.2), or
 * with -DARM in any order but that of stores to the same place. With -DARM a load may also have been satisfied early: it
 * has any value that its place had since the last fence, but none older than what the same process has seen or stored
 * there (`seen`, which catches up with memory one place at a time, whenever it likes; as the invalidate queues of
 * McKenney, Memory Barriers: a Hardware View for Software Hackers, 2010). No load is taken for an acquire. Stores are not
 * satisfied before earlier loads: each of them comes after a branch on what was loaded before it, which Arm keeps in order
 * (Arm ARM, B2.3, control dependency).
 *
 * A full fence waits for the buffer to be empty, and catches up. A ring of a bell does, too: write(2) to an eventfd takes
 * the kernel's lock, which whoever is woken takes after it. With -DTWIN, a fence is what the Python twin has on Arm: it
 * keeps stores in order and loads in order, but lets a load pass a store; then a sleep ends by itself (RECHECK_S). No load
 * is satisfied early where the twin's writer sleeps: that search does not end within five minutes.
 *
 *     step here       C (ring/core/*.c)                  Python
 *     publish, tell   publish, readers_parked             ring/reference.py WriterBase.commit, put_many; memory_fence
 *     ring_reader     -                                   queue/local/readers.py LocalReaders.wake_readers; lifeline/sockets.py Doorbell
 *     park            -                                   wait/poller.py Poller._sleep
 *     release         finish, writer_parked               ReaderBase.release, take_many, ReaderControl.give_back
 *     can_go_on       -                                   ring/ends.py ReaderControl.writer_can_go_on, WriterControl.want;
 *                                                         queue/local/leases.py WriterWaker.wake
 *     woken by end    -                                   lifeline/listener.py, dialer.py (end of file), LocalReaders.gone
 *
 * -DREADERS_SLEEP: the writer publishes MESSAGES, BATCH of them with one fence, a reader sleeps for each; the writer may be
 * killed before any step. Else: the writer sleeps until both readers have finished with message 1, though it has waited
 * for message 2 before and given that up; reader 1 may be killed.
 *
 * Property: no deadlock. Whoever sleeps has been rung, or nobody owes him anything.
 */

#define MESSAGES 3
#define BATCH 1
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
#if defined(ARM) && (defined(READERS_SLEEP) || !defined(TWIN))
#define EARLY
byte seen[18];             /* what a process may still load from each place */
#define SEEN(p, a) seen[(p) * 6 + a]
inline catch_up(p) { d_step { SEEN(p, 0) = mem[0]; SEEN(p, 1) = mem[1]; SEEN(p, 2) = mem[2]; SEEN(p, 3) = mem[3]; SEEN(p, 4) = mem[4]; SEEN(p, 5) = mem[5] } }
#else
#define SEEN(p, a) mem[a]
inline catch_up(p) { skip }
#endif
inline load(p, a, x) {
    d_step {
        x = SEEN(p, a); j = 0;
        do
        :: j < held[p] && place[(p) * B + j] == a -> x = value[(p) * B + j]; j++
        :: j < held[p] && place[(p) * B + j] != a -> j++
        :: j >= held[p] -> break
        od;
        j = 0
    }
}
#ifdef TWIN
inline fence(p) { atomic { fenced[p] = 1; catch_up(p) } }
#elif defined(STORES_ONLY)
inline fence(p) { held[p] == 0 }
#else
inline fence(p) { atomic { held[p] == 0; catch_up(p) } }
#endif
inline ring(p, b) { atomic { held[p] == 0; bell[b] = 1; catch_up(p) } }

/* Memory: takes what is in the buffers, sooner or later. */
inline take_out(p, k) {
    d_step {
        mem[place[(p) * B + k]] = value[(p) * B + k];
#ifdef EARLY
        SEEN(p, place[(p) * B + k]) = value[(p) * B + k];
#endif
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
#ifdef ARM
/* Store k may go out before those ahead of it: to other places, with no fence between. */
#define AHEAD(p, k, i) (place[(p) * B + i] != place[(p) * B + k] && !after[(p) * B + i + 1])
#define MAY_PASS(p, k) held[p] > k && AHEAD(p, k, 0) && (k < 2 || AHEAD(p, k, 1))
#define LATE(p, a) :: SEEN(p, a) != mem[a] -> SEEN(p, a) = mem[a]
#endif
active proctype memory() {
    byte j;
end: do
    :: held[0] > 0 -> take_out(0, 0)
    :: held[1] > 0 -> take_out(1, 0)
    :: held[2] > 0 -> take_out(2, 0)
#ifdef ARM
    :: MAY_PASS(0, 1) -> take_out(0, 1)
    :: MAY_PASS(1, 1) -> take_out(1, 1)
    :: MAY_PASS(2, 1) -> take_out(2, 1)
    :: MAY_PASS(0, 2) -> take_out(0, 2)
    :: MAY_PASS(1, 2) -> take_out(1, 2)
    :: MAY_PASS(2, 2) -> take_out(2, 2)
#if defined(EARLY) && defined(READERS_SLEEP)
    LATE(0, R_PARKED) LATE(1, PUBLISHED)
#elif defined(EARLY)
    LATE(0, FLAG) LATE(0, FLAG + 1)
    LATE(1, W_PARKED) LATE(1, WANTED) LATE(1, FLAG) LATE(1, FLAG + 1)
    LATE(2, W_PARKED) LATE(2, WANTED) LATE(2, FLAG) LATE(2, FLAG + 1)
#endif
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
        fence(0);                                                                /* -NO_FENCE_AFTER_PUBLISHING */
        load(0, R_PARKED, parked);                   /* tell */
        if
        :: parked ->
            store(0, R_PARKED, 0);                   /* ring_reader: one ring is enough until it wakes */ /* -RING_FIRST */
            ring(0, 0)                                                           /* -RING_FIRST */
            /* +RING_FIRST: ring(0, 0); store(0, R_PARKED, 0) */
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
                fence(1);                                                        /* -NO_FENCE_AFTER_PARKING */
                load(1, PUBLISHED, there);                                       /* -NO_LOOK_AFTER_PARKING */
                if :: there > have -> break :: else fi;                          /* -NO_LOOK_AFTER_PARKING */
                /* +DRAIN_AFTER_LOOKING: bell[0] = 0; */
                if
                :: atomic { bell[0] == 1 -> bell[0] = 0; catch_up(1) }
                :: atomic { dead[0] -> end_of_file = 1; catch_up(1) } break      /* -NO_END_OF_FILE */
#ifdef TWIN
                :: true                              /* the timer */             /* -NO_RECHECK */
#endif
                fi;
                /* +NO_LOOK_AFTER_PARKING: break */
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
    d_step {
        mem[WANTED] = 2;                             /* from a wait that was given up */
#ifdef EARLY
        SEEN(0, WANTED) = 2; SEEN(1, WANTED) = 2; SEEN(2, WANTED) = 2;
#endif
    };
    store(0, WANTED, 1);                             /* want */
    fence(0);                                                                    /* -NO_FENCE_AFTER_WANTING */
    do                                               /* park */
    :: store(0, W_PARKED, 1);
        fence(0);                                                                /* -NO_FENCE_AFTER_PARKING */
        load(0, FLAG, mine);                                                     /* -NO_LOOK_AFTER_PARKING */
        load(0, FLAG + 1, other);                                                /* -NO_LOOK_AFTER_PARKING */
        if :: mine && (other || read_killed) -> break :: else fi;                /* -NO_LOOK_AFTER_PARKING */
        if
        :: atomic { bell[1] == 1 -> bell[1] = 0; catch_up(0) }
        :: atomic { dead[2] && !read_killed -> read_killed = 1; catch_up(0) }    /* -NO_END_OF_FILE */
            store(0, FLAG + 1, 1)                    /* gone: evicted, its flags are set */ /* -NO_END_OF_FILE */
#ifdef TWIN
        :: true                                                                  /* -NO_RECHECK */
#endif
        fi;
        /* +NO_LOOK_AFTER_PARKING: load(0, FLAG, mine); */
        /* +NO_LOOK_AFTER_PARKING: load(0, FLAG + 1, other); */
        /* +NO_LOOK_AFTER_PARKING: if :: mine && (other || read_killed) -> break :: else fi; */
    od;
    store(0, W_PARKED, 0)
}

proctype reader(byte r) {
    byte parked, wanted, mine, other, j;
    {
    store(1 + r, FLAG + r, 1);                       /* release */
    fence(1 + r);                                                                /* -NO_FENCE_AFTER_RELEASING */
    load(1 + r, W_PARKED, parked);
    if
    :: parked ->
        load(1 + r, W_PARKED, parked);               /* can_go_on */
        fence(1 + r);                                                            /* -NO_FENCE_IN_CAN_GO_ON */
        load(1 + r, WANTED, wanted);
        load(1 + r, FLAG, mine);
        load(1 + r, FLAG + 1, other);
        if
        :: parked && wanted == 1 && mine && other ->
            store(1 + r, W_PARKED, 0);                                           /* -NO_RING */
            ring(1 + r, 1)                                                       /* -NO_RING */
            /* +NO_RING: store(1 + r, W_PARKED, 0) */
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
