/* The slots of a ring: claim, commit, peek, release, leases, eviction, admission with history, chunks used again.
 *
 * One writer, two readers, three slots, two chunks. A step is one load or store of shared memory, in the order of the
 * program; what another order does is the litmus tests' (verify/litmus). Every process may be killed before any step.
 *
 *     step here         C (ring/core/*.c)               Python
 *     is_free           is_free                          ring/reference.py WriterBase._is_free, finished
 *     CLAIM             claim, reclaim                   WriterBase._claim; ring/record.py Chunks.reclaim
 *     FILL, PUBLISH     put_bytes, publish               WriterBase._fill, _publish; Chunks.take
 *     EVICT             -                                ring/ends.py WriterControl.evict; queue/local/readers.py
 *                                                        LocalReaders.evict, drop
 *     ADMIT             -                                WriterControl.admit, _oldest_of, _has, _keep_again;
 *                                                        Chunks.keep_again; LocalReaders.admit, registry.py ReaderSlot.why_taken
 *     RESUME            -                                ring/ends.py WriterControl.resume; LocalReaders.keep
 *     LOOK              is_ready                         ReaderBase.ready
 *     COPY              copy_plain                       ReaderBase._copy_plain
 *     FINISH            finish                           ReaderBase._finish
 *     KEEP, GIVE_BACK   reader_skip                      ReaderBase.skip; ring/ends.py ReaderControl.give_back
 *
 * A batch (put_many, take_many) takes these same steps; only its fence and its look at who is parked come once, which is
 * parking.pml's. That flags are read one after the other by is_free makes no difference: readers only set them, and who
 * clears them is the writer itself.
 *
 * WHOLE is was_evicted and ReaderBase.was_evicted: without that look at its flag after copying, a reader that is dismissed
 * in the middle of a copy may return a torn message before it hears that it was dismissed. Readers that the writer does
 * not wait for (WriterControl.pass_over, ReaderControl.lose) are in the model copying.
 *
 * Properties, as assertions: what is read is whole, is the message whose turn it is, and was published; a replacement
 * begins with the first message that was not taken; every chunk is free or in use, once. As the absence of a deadlock:
 * the writer gets rid of all its messages, which it does not where a slot or a chunk is lost or a dead reader is waited
 * for; and readers end once the writer is gone, having read everything that was published.
 *
 * Bounds: N messages, DEATHS kills of VICTIM, JOINS admissions, DISMISS: whether a living reader is dismissed, a history of at most
 * HISTORY, LEASES slots kept at once. All of it together is more states than there is memory: see verify/models.toml.
 */

#define N 4
#define DEATHS 0
#define JOINS 0
#define HISTORY 2
#define SIZES 2            /* 0: all fit a slot, 1: all take a chunk, 2: by turns, 3: any */
#define ABANDON 0          /* whether filling a claimed slot may fail, once */
#define VICTIM 1           /* who may be killed: a reader; 2: the writer */
#define DISMISS 0          /* whether living readers are dismissed */
#define LEASES 0           /* slots that a reader keeps at once */
#define S 3                /* slots */
#define C 2                /* chunks */
#define NOTHING 15

/* Shared memory. A body has two halves, so that a torn one shows; those of chunks are behind those of slots. */
bit written[S];
bit flag[6];               /* of slot s and reader r: 2 * s + r */
byte hseq[S];
byte hchunk[S];    /* 0: the body is in the slot; 1 + chunk */
byte stamp[C];
byte head[5];
byte tail[5];
byte count[2];     /* messages read */

/* The lifelines, as far as they matter here. */
mtype = { VACANT, HERE, DEAD, ASKED, HUNG_UP };
mtype place[2] = VACANT;   /* ASKED: told that it was evicted; HUNG_UP: it has heard that, and will touch nothing more */
byte start[2];
bit gone;                  /* the writer has closed or died */
bit leaving;               /* the reader at place 1 was evicted and has its end open still */
bit hold;                  /* on_reader_death="hold" */

/* For the properties alone. */
byte published;
byte taken[2];     /* what the reader at this place will take next, or its replacement has to */
bit kill[3];
byte inc[2];      /* which reader in turn has this place: two must never write to the same flags */
byte deaths;
byte joins;

/* The writer's own. */
byte seq;
byte at;           /* seq % S */
bit unread[2];
byte places = 2;   /* readers but those behind the last one that was not evicted */
byte free[C];
byte n_free;
byte used_seq[C];
byte used_chunk[C];
byte n_used;
byte claimed;      /* 0: nothing, 1: the slot, 2: a chunk, too */

#define ALL_READ(i) ((places < 1 || flag[2 * (i)]) && (places < 2 || flag[2 * (i) + 1]))
#define IS_FREE(i) (!written[i] || ALL_READ(i))
#define IS_FINISHED(m) ((m) + S < seq || IS_FREE((m) % S))

inline use_oldest_shift() {
    used_seq[0] = used_seq[1]; used_chunk[0] = used_chunk[1]; used_seq[1] = 0; used_chunk[1] = 0; n_used--
}

/* reclaim: what all have read is free again */
inline reclaim() {
    do
    :: n_used > 0 && IS_FINISHED(used_seq[0]) ->
        free[n_free] = used_chunk[0];
        n_free++;
        use_oldest_shift()
    :: else -> break
    od
}

/* keep_again: a chunk that a newcomer's history lies in is in use again */
inline keep_again(m) {
#ifndef NO_KEEP_AGAIN
    if
    :: hchunk[m % S] != 0 && (n_used == 0 || used_seq[0] > m) ->
        chunk = hchunk[m % S] - 1;
        if
        :: n_free - (claimed == 2 -> 1 : 0) >= 1 && free[0] == chunk ->
            free[0] = free[1]; free[1] = 0; n_free--; found = 1
        :: n_free - (claimed == 2 -> 1 : 0) >= 2 && free[0] != chunk && free[1] == chunk ->
            free[1] = 0; n_free--; found = 1
        :: else -> found = 0
        fi;
        if
        :: found ->
            used_seq[1] = used_seq[0]; used_chunk[1] = used_chunk[0];
            used_seq[0] = m; used_chunk[0] = chunk; n_used++; found = 0
        :: else
        fi;
        chunk = 0
    :: else
    fi
#else
    skip
#endif
}

inline check_chunks() {
    assert(n_free + n_used == C);
    assert(n_free != 2 || free[0] != free[1]);
    assert(n_used != 2 || used_chunk[0] != used_chunk[1]);
    assert(n_free != 1 || free[0] != used_chunk[0])
}

/* has_message: whether slot and chunk still have it */
#define SLOT_HAS(m) (written[(m) % S] && hseq[(m) % S] == (m))                   /* -NO_SEQ_CHECK */
/* +NO_SEQ_CHECK: #define SLOT_HAS(m) (written[(m) % S]) */
#define CHUNK_HAS(m) (hchunk[(m) % S] == 0 || stamp[hchunk[(m) % S] - 1] == (m) + 1) /* -NO_STAMP_CHECK */
/* +NO_STAMP_CHECK: #define CHUNK_HAS(m) true */

#define MAY_HAVE_1 (place[1] == VACANT)                                          /* -NO_LEAVING */
/* +NO_LEAVING: #define MAY_HAVE_1 (place[1] == VACANT || place[1] == ASKED) */

inline count_places() {
    if
    :: !unread[1] -> places = 2
    :: unread[1] && !unread[0] -> places = 1
    :: else -> places = 0
    fi
}

inline evict(r) {
    unread[r] = 1;
    flag[r] = 1;
    flag[2 + r] = 1;
    flag[4 + r] = 1;                                                             /* -NO_EVICT_ALL */
    d_step { count_places(); }
}

inline publish() {
    d_step {
        if
        :: claimed == 2 -> n_free--; used_seq[n_used] = seq; used_chunk[n_used] = free[n_free]; free[n_free] = 0; n_used++
        :: else
        fi;
        claimed = 0;
        check_chunks()
    };
    /* +ANNOUNCE_FIRST: atomic { written[at] = 1; published++ }; */
    if                                                                           /* -NO_CLEAR */
    :: places > 0 -> flag[2 * at] = unread[0]                                    /* -NO_CLEAR */
    :: else                                                                      /* -NO_CLEAR */
    fi;                                                                          /* -NO_CLEAR */
    if                                                                           /* -NO_CLEAR */
    :: places > 1 -> flag[2 * at + 1] = unread[1]                                /* -NO_CLEAR */
    :: else                                                                      /* -NO_CLEAR */
    fi;                                                                          /* -NO_CLEAR */
    atomic { written[at] = 1; published++ };                                     /* -ANNOUNCE_FIRST */
    d_step { seq++; at = (at + 1 == S -> 0 : at + 1) }
}

active proctype writer() {
    byte first;
    byte m;
    byte i;
    byte chunk;
    bit found, large, chosen, abandoned;
    d_step { free[0] = 1; free[1] = 0; n_free = 2; place[0] = HERE; place[1] = HERE };
    if
    :: hold = 0
    :: hold = 1
    fi;
    {
    do
    :: !chosen && seq < N ->
        if
        :: SIZES != 1 && (SIZES != 2 || seq % 2 == 0) -> large = 0
        :: SIZES > 0 && (SIZES != 2 || seq % 2 == 1) -> large = 1
        fi;
        chosen = 1
    :: claimed == 0 && chosen && IS_FREE(at) &&                            /* CLAIM */
        (!large || n_free > 0 || (n_used > 0 && IS_FINISHED(used_seq[0]))) ->
        d_step {
            if
            :: large -> reclaim(); check_chunks()
            :: else
            fi
        };
        written[at] = 0;                                                         /* -NO_UNWRITE */
        if
        :: large -> stamp[free[n_free - 1]] = seq + 1
        :: else
        fi;
        d_step {
            claimed = 1 + large;
            hseq[at] = seq;
            hchunk[at] = (large -> 1 + free[n_free - 1] : 0)
        }
    :: claimed != 0 ->                                                     /* FILL, PUBLISH */
        d_step { i = (claimed == 2 -> S + free[n_free - 1] : at); m = seq };
        /* +PUBLISH_FIRST: publish(); */
        head[i] = m;
        tail[i] = m;
        publish();                                                               /* -PUBLISH_FIRST */
        d_step { i = 0; m = 0; chosen = 0; large = 0 }
#ifdef RECLAIM_CLAIMED
    :: n_used > 0 && IS_FINISHED(used_seq[0]) ->                           /* asked for room */
#else
    :: claimed != 2 && n_used > 0 && IS_FINISHED(used_seq[0]) ->
#endif
        d_step { reclaim(); check_chunks() }
    :: ABANDON && claimed != 0 && !abandoned -> d_step { abandoned = 1; claimed = 0 } /* the filling has failed */
    :: hold == 0 && place[0] == DEAD -> evict(0); place[0] = VACANT        /* EVICT */
    :: hold == 0 && place[1] == DEAD && !leaving -> evict(1); place[1] = VACANT
    :: DISMISS && place[1] == HERE && !leaving ->                                 /* DISMISS, though it lives */
        leaving = 1;
        evict(1);
        atomic {
            if
            :: place[1] == HERE -> place[1] = ASKED
            :: else
            fi
        }
    :: leaving && (place[1] == HUNG_UP || place[1] == DEAD) ->
        atomic { leaving = 0; place[1] = VACANT }
    :: joins < JOINS &&                                                    /* ADMIT */
        (MAY_HAVE_1 || place[0] == VACANT) ->
        d_step {
            joins++;
            i = (MAY_HAVE_1 -> 1 : 0)
        };
        if
        :: m = 0
        :: m = HISTORY
        fi;
        d_step {
            first = seq;
            do
            :: first > 0 && seq - first < m && SLOT_HAS(first - 1) && CHUNK_HAS(first - 1) -> first--
            :: else -> break
            od;
            m = seq
        };
        do
        :: m > first ->
            d_step { m--; keep_again(m); check_chunks() };
            flag[2 * (m % S) + i] = 0                                            /* -NO_HISTORY_FLAG */
        :: else -> break
        od;
        atomic {
            unread[i] = 0; count_places();
            count[i] = first; start[i] = first; taken[i] = first; inc[i]++;
            place[i] = HERE; first = 0; m = 0; i = 0
        }
    :: hold == 1 && (place[0] == DEAD || (place[1] == DEAD && !leaving)) -> /* RESUME */
        d_step {
            i = (place[0] == DEAD -> 0 : 1);
            m = (seq > S && count[i] < seq - S -> seq - S : count[i]);           /* -NO_CATCH_UP */
            /* +NO_CATCH_UP: m = count[i]; */
            first = m;
            do
            :: m > 0 && m + S > seq && !flag[2 * ((m - 1) % S) + i] -> m--;
                flag[2 * (m % S) + i] = 1                                        /* -NO_GIVE_BACK */
            :: else -> break
            od;
            do                                                                   /* -NO_RESUME_SKIP */
            :: first < seq && flag[2 * (first % S) + i] -> first++               /* -NO_RESUME_SKIP */
            :: else -> break                                                     /* -NO_RESUME_SKIP */
            od;                                                                  /* -NO_RESUME_SKIP */
            count[i] = first; start[i] = first; inc[i]++;
            assert(first == taken[i]);
            place[i] = HERE; first = 0; m = 0; i = 0
        }
    :: claimed == 0 && seq == N -> break
    od
    } unless { DEATHS > 0 && kill[2] };
    gone = 1;
    if                                                                     /* closed: every slot and chunk comes back */
    :: kill[2]
    :: !kill[2] -> (place[0] != HERE && place[0] != VACANT) || (place[1] != HERE && place[1] != VACANT) ||
        (ALL_READ(0) && ALL_READ(1) && ALL_READ(2))
        d_step {
            if
            :: ALL_READ(0) && ALL_READ(1) && ALL_READ(2) -> reclaim(); assert(n_free == C)
            :: else
            fi
        }
    fi
}

proctype reader(bit r) {
    byte next;
    byte i;
    byte chunk;
    byte h;
    byte t;
    byte kept;
    byte me;
begin:
end:
    do
    :: place[r] == HERE -> d_step { next = start[r]; i = next % S; me = inc[r] }; break
    :: gone && place[r] != HERE && place[r] != ASKED -> goto over
    od;
    {
looking:
    do
#ifndef LOOK_WRITTEN_FIRST
    :: flag[2 * i + r] == 0 && kept < 1 + (LEASES > 0) ->                                 /* LOOK */
        if
        :: written[i] == 1 -> goto copy
        :: written[i] == 0 -> (written[i] == 1 || flag[2 * i + r] == 1 || gone)
        fi;
        if                                                                       /* -NO_LAST_LOOK */
        :: gone && written[i] == 0 -> assert(kept > 0 || next == published); goto over /* -NO_LAST_LOOK */
        :: else                                                                  /* -NO_LAST_LOOK */
        fi                                                                       /* -NO_LAST_LOOK */
        /* +NO_LAST_LOOK: if */
        /* +NO_LAST_LOOK: :: gone -> assert(kept > 0 || next == published); goto over */
        /* +NO_LAST_LOOK: :: else */
        /* +NO_LAST_LOOK: fi */
#else
    :: written[i] == 1 && kept < 1 + (LEASES > 0) ->
        if
        :: flag[2 * i + r] == 0 -> goto copy
        :: flag[2 * i + r] == 1 ->
            (flag[2 * i + r] == 0 || written[i] == 0 || gone || kept > 0 || place[r] == ASKED)
        fi
#endif
    :: kept > 0 -> goto give_back
    :: place[r] == ASKED -> goto hang_up
    :: gone && kept == 0 && flag[2 * i + r] == 1 && place[r] == HERE -> assert(next == published); goto over
    od;
copy:                                                                      /* COPY */
    atomic { h = hseq[i]; chunk = hchunk[i] };
    if
    :: h != next -> goto refused
    :: else
    fi;
    if
    :: r == 1 ->
        h = head[(chunk == 0 -> i : S + chunk - 1)];
        t = tail[(chunk == 0 -> i : S + chunk - 1)]
    :: r == 0 -> atomic {                                                  /* who is never dismissed needs no two steps */
        h = head[(chunk == 0 -> i : S + chunk - 1)];
        t = tail[(chunk == 0 -> i : S + chunk - 1)] }
    fi;
    if                                                                     /* WHOLE */ /* -NO_WHOLE */
    :: flag[2 * i + r] == 1 -> goto refused                                /* evicted meanwhile: it may be torn */ /* -NO_WHOLE */
    :: flag[2 * i + r] == 0                                                      /* -NO_WHOLE */
    fi;                                                                          /* -NO_WHOLE */
    d_step {
        assert(h == next && t == next);                                    /* whole, and its turn */
        assert(next < published);                                          /* for everybody to read */
        chunk = 0; h = 0; t = 0
    };
    if
    :: kept == 0 ->                                                        /* FINISH */
        atomic {
            assert(me == inc[r]);
            flag[2 * i + r] = 1;
            taken[r] = next + 1;
            next++;
            i = (i + 1 == S -> 0 : i + 1)
        };
        count[r] = next
    :: kept < LEASES ->                                                      /* KEEP */
        atomic { next++; i = (i + 1 == S -> 0 : i + 1); count[r] = next; taken[r] = next; kept++ }
    fi;
    goto looking;
give_back:                                                                 /* GIVE_BACK: in order */
    atomic {
        assert(me == inc[r]);
#ifndef OUT_OF_ORDER
        h = next - kept;
        assert(flag[2 * (h % S) + r] == 1 || head[(hchunk[h % S] == 0 -> (h % S) : S + hchunk[h % S] - 1)] == h);
        flag[2 * (h % S) + r] = 1;
        h = 0; kept--
    };
#else
        flag[2 * ((next - 1) % S) + r] = 1
    };
    if
    :: kept == 2 -> flag[2 * ((next - 2) % S) + r] = 1
    :: else
    fi;
    kept = 0;
#endif
    goto looking;
refused:
    place[r] == ASKED;
hang_up:
    atomic { h = 0; t = 0; chunk = 0; kept = 0; next = 0; i = 0; me = 0; place[r] = HUNG_UP };
    goto begin
    } unless { DEATHS > 0 && kill[r] };
    d_step { kill[r] = 0; h = 0; t = 0; chunk = 0; kept = 0; next = 0; i = 0; me = 0; place[r] = DEAD };
    goto begin;
over:
    skip
}

active proctype killer() {
    do
    :: deaths < DEATHS -> atomic {
        deaths++;
        if
        :: VICTIM == 0 -> kill[0] = 1
        :: VICTIM == 1 -> kill[1] = 1
        :: VICTIM == 2 -> kill[2] = 1
        fi }
    :: break
    od
}

init { atomic { run reader(0); run reader(1) } }
