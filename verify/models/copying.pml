/* A reader that the writer does not wait for: it never takes a torn or an old message, and reports every loss.
 *
 * One writer of N messages and one reader with slow_reader="skip", in a ring of S slots. A body has two parts, so that a
 * copy made meanwhile may be torn. Loads happen in the order of the program here; litmus_tests/copy-number.litmus says
 * what the fences are for. Each mutation in models.toml, such as -NO_MARK, removes the lines that have its name.
 *
 *     step here       in the code
 *     pass over       readers.py LocalReaders._make_room; ends.py WriterControl.pass_over
 *     fast            receive.c reader_take, copy_plain, was_evicted
 *     slow, finish    copying.py CopyingSlots._copy, _finish; ends.py ReaderControl.intact
 *     lose            ends.py ReaderControl.lose
 *
 * Properties: what is delivered is whole and the next message in order; what is lost was published, and is named: every
 * number is delivered or lost, once.
 */
#define S 3
#define N 12
bit written[S], flag[S];
byte number[S], head[S], tail[S];
byte published, next;      /* the writer's count, and the reader's: what is below was delivered or named as lost */

inline intact(m) {
    ok = !flag[m % S];
    ok = ok && number[m % S] == m
}

active proctype writer() {
    byte m, k, passed;
    do
    :: m < N ->
        if
        :: written[m % S] && !flag[m % S] ->                                    /* pass over */
            k = (passed + S > m -> passed : m - S);
            do
            :: k + S <= m -> flag[k % S] = 1; k++
            :: else -> break
            od;
            passed = k; k = 0
        :: else
        fi;
        written[m % S] = 0;
        number[m % S] = m;
        head[m % S] = m;
        tail[m % S] = m;
        flag[m % S] = 0;
        written[m % S] = 1;
        atomic { m++; published = m }
    :: else -> break
    od
}

active proctype reader() {
    byte h, t, k, w, half, lost = 255; bit ok;
    do
    :: next == N -> break
    :: next < N ->
        if :: flag[next % S] -> goto slow :: !flag[next % S] fi;                 /* fast */
        if :: !written[next % S] -> goto slow :: written[next % S] fi;
        if :: number[next % S] != next -> goto slow :: number[next % S] == next fi;
        h = head[next % S]; t = tail[next % S];
        if :: flag[next % S] -> goto slow :: !flag[next % S] fi;                 /* -NO_FLAG */
        if :: number[next % S] != next -> goto slow :: number[next % S] == next fi; /* -NO_NUMBER */
        assert(h == next && t == next);
        flag[next % S] = 1;
        next++;
        goto again;
slow:   if :: published <= next -> goto again :: published > next fi;
        intact(next);
        if
        :: ok -> h = head[next % S]; t = tail[next % S];
            intact(next)                                                        /* -NO_SECOND_LOOK */
        :: !ok
        fi;
        if
        :: ok -> assert(h == next && t == next);
            intact(next);                                                       /* finish */
            if :: ok -> flag[next % S] = 1 :: !ok fi;
            next++
        :: !ok ->                                                               /* lose */
            w = published;
            assert(next < w);
            k = (w > S && w - S > next + 1 -> w - S : next + 1);
            do
            :: k < w && !ok -> ok = !flag[k % S]; ok = ok && number[k % S] == k; k = k + !ok
            :: k >= w || ok -> break
            od;
            if
            :: next == lost -> half = (k + w) / 2;
                do
                :: k < half ->
                    flag[k % S] = 1;                                            /* -NO_MARK */
                    k++
                :: k >= half -> break
                od
            :: else
            fi;
            atomic { next = k; lost = k; k = 0; w = 0; half = 0 }
        fi;
again:  h = 0; t = 0; ok = 0
    od
}
