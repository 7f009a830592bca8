/* Event batches to msgpack in C11, events as maps: the bytes that the twin in encoding.py makes, in half its time.
 *
 * An encoder takes what engines publish: known events, whole numbers of up to 64 bits, text, bytes, lists and tuples
 * of them. At anything else it makes None, and the twin does that batch, or says what is wrong with it. No code of
 * others runs meanwhile, so under the GIL nothing can change while it is read.
 *
 * Most of a batch is tokens. Their digits are read in place, which the stable ABI does not allow, and their length is
 * looked up instead of branched on: which of three lengths a token has is nothing that a CPU could predict.
 *
 * https://github.com/msgpack/msgpack/blob/master/spec.md
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef Py_GIL_DISABLED
#error "without the GIL a list may change while it is read; the Python twin serves this interpreter"
#endif

#define MAX_FIELDS 32
#define MAX_DEPTH 8            /* of lists within lists; deeper ones are the twin's */
#define NUMBER_BYTES 9         /* at most */
#define STAMP_BYTES 32         /* the longest tag or key with its header, and a little */
#define SLACK 16               /* what every value has room for without asking: a number, a header, a whole word */
#define LEAST_BYTES 1024

/* Bytes that are written as they are: tags and keys. Copying all of them takes less time than asking how many. */
typedef struct {
    uint8_t bytes[STAMP_BYTES];
    size_t size;
} Stamp;

/* One type of event: what stands in front of its fields, and where these are. */
typedef struct {
    PyTypeObject *type;
    Stamp head;                       /* the key of the tag, and the tag */
    size_t fields, always;            /* all of them; how many are written even if they are None */
    size_t room;                      /* what everything but long values may take */
    Py_ssize_t offsets[MAX_FIELDS];
    Stamp keys[MAX_FIELDS];
} Kind;

typedef struct {
    PyObject_HEAD
    Py_ssize_t count;
    Kind *kinds;
    size_t expected;                  /* bytes of the next payload: about as many as the last one had */
} Encoder;

/* A payload while it is written, up to `end` at most. */
typedef struct {
    PyObject *payload;                /* NULL if memory ended */
    uint8_t *end;
    bool unknown;                     /* found something that is the twin's */
} Out;

/* Output. Every function takes where to write, with room for SLACK bytes there, and returns where the next value goes:
 * so the place stays in a register. NULL is for an exception or for something unknown. */

__attribute__((cold, noinline)) static uint8_t *unknown(Out *out)
{
    out->unknown = true;
    return NULL;
}

/* Make the payload `size` bytes long. */
static uint8_t *resize(Out *out, uint8_t *at, size_t size)
{
    size_t used = (size_t)(at - (uint8_t *)PyBytes_AS_STRING(out->payload));
    if (_PyBytes_Resize(&out->payload, (Py_ssize_t)size) < 0)
        return NULL;
    uint8_t *start = (uint8_t *)PyBytes_AS_STRING(out->payload);
    out->end = start + size;
    return start + used;
}

__attribute__((cold, noinline)) static uint8_t *grow(Out *out, uint8_t *at, size_t amount)
{
    size_t size = (size_t)PyBytes_GET_SIZE(out->payload);
    if (amount > PY_SSIZE_T_MAX / 2 - size) {
        PyErr_NoMemory();
        return NULL;
    }
    return resize(out, at, size + (amount > size ? amount : size));
}

/* Make room for SLACK bytes behind so many others. */
static inline uint8_t *room(Out *out, uint8_t *at, size_t amount)
{
    if (__builtin_expect((size_t)(out->end - at) >= amount + SLACK, 1))
        return at;
    return grow(out, at, amount + SLACK);
}

static inline void store_big_endian(uint8_t *at, uint64_t word)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    memcpy(at, &word, sizeof word);
}

/* A number below 2**32 in 1, 2, 3 or 5 bytes; writes 8. */
static inline uint8_t *write_small(uint8_t *at, uint32_t number)
{
    /* All of a form is in one word: what of it is not written does no harm behind the number. */
#define FORM(prefix, bytes, shift) (UINT64_C(prefix) << 56 | (bytes) << 8 | (shift))
    static const uint64_t forms[] = {  /* by the place of the highest bit */
        [0 ... 6] = FORM(0, 1, 56),
        [7] = FORM(0xcc, 2, 48),
        [8 ... 15] = FORM(0xcd, 3, 40),
        [16 ... 31] = FORM(0xce, 5, 24),
    };
    uint64_t form = forms[31 ^ __builtin_clz(number | 1)];
    store_big_endian(at, form | (uint64_t)number << (form & 63));
    return at + (uint8_t)(form >> 8);
}

static inline uint8_t *write_number(uint8_t *at, uint64_t number)
{
    if (number <= UINT32_MAX)
        return write_small(at, (uint32_t)number);
    *at = 0xcf;
    store_big_endian(at + 1, number);
    return at + NUMBER_BYTES;
}

/* The header of something that has a length. `fixed` is its form with the length in it, for those below `below`;
 * `form8` the one with 8 bits, or 0 where there is none; `form16` the one with 16, and the one with 32 comes next. */
static inline uint8_t *write_header(uint8_t *at, size_t length, uint8_t fixed, size_t below, uint8_t form8,
                                    uint8_t form16)
{
    if (length < below) {
        *at = (uint8_t)(fixed | length);
        return at + 1;
    }
    if (form8 && length <= 0xff) {
        at[0] = form8, at[1] = (uint8_t)length;
        return at + 2;
    }
    if (length <= 0xffff) {
        at[0] = form16;
        store_big_endian(at + 1, (uint64_t)length << 48);
        return at + 3;
    }
    at[0] = form16 + 1;
    store_big_endian(at + 1, (uint64_t)length << 32);
    return at + 5;
}

static uint8_t *put_block(Out *out, uint8_t *at, const void *bytes, size_t amount)
{
    if (amount > UINT32_MAX)
        return unknown(out);
    if ((at = room(out, at, amount)) == NULL)
        return NULL;
    memcpy(at, bytes, amount);
    return at + amount;
}

/* Numbers */

/* The one digit of a number from 1 to 2**30 - 1; false for other numbers, and for 0 on some versions. */
static inline bool single_digit(PyObject *number, uint32_t *digit)
{
#if PY_VERSION_HEX >= 0x030C0000
    const PyLongObject *it = (const PyLongObject *)number;
    if (!PyUnstable_Long_IsCompact(it))
        return false;
    Py_ssize_t value = PyUnstable_Long_CompactValue(it);
    *digit = (uint32_t)value;
    return value >= 0;
#else
    *digit = ((PyLongObject *)number)->ob_digit[0];
    return Py_SIZE(number) == 1;
#endif
}

static inline uint8_t *put_number(Out *out, uint8_t *at, PyObject *number)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {  /* negative, or above 64 bits */
        PyErr_Clear();
        return unknown(out);
    }
    return write_number(at, value);
}

/* Values */

static uint8_t *put(Out *out, uint8_t *at, PyObject *value, int depth);

/* Values one after another; there is room for as many numbers. */
static inline uint8_t *put_values(Out *out, uint8_t *at, PyObject *const *values, size_t count, int depth)
{
    for (size_t i = 0; i < count; i++) {
        PyObject *value = values[i];
        uint32_t small;
        if (PyLong_CheckExact(value)) {
            if (single_digit(value, &small)) {
                at = write_small(at, small);
                continue;
            }
            if ((at = put_number(out, at, value)) == NULL)
                return NULL;
            continue;
        }
        if (value == Py_None) {
            *at++ = 0xc0;
            continue;
        }
        if ((at = put(out, at, value, depth)) == NULL || (at = room(out, at, (count - i) * NUMBER_BYTES)) == NULL)
            return NULL;
    }
    return at;
}

static uint8_t *put_items(Out *out, uint8_t *at, PyObject *const *items, size_t count, int depth)
{
    if (count > UINT32_MAX || depth == MAX_DEPTH)
        return unknown(out);
    at = write_header(at, count, 0x90, 16, 0, 0xdc);
    if ((at = room(out, at, count * NUMBER_BYTES)) == NULL)
        return NULL;
    return put_values(out, at, items, count, depth + 1);
}

static uint8_t *put_text(Out *out, uint8_t *at, PyObject *text)
{
    Py_ssize_t length;
    const void *bytes;
    if (PyUnicode_IS_COMPACT_ASCII(text)) {
        bytes = PyUnicode_1BYTE_DATA(text);
        length = PyUnicode_GET_LENGTH(text);
    } else if ((bytes = PyUnicode_AsUTF8AndSize(text, &length)) == NULL) {
        if (PyErr_ExceptionMatches(PyExc_MemoryError))
            return NULL;
        PyErr_Clear();                /* lone surrogates */
        return unknown(out);
    }
    at = write_header(at, (size_t)length, 0xa0, 32, 0xd9, 0xda);
    return put_block(out, at, bytes, (size_t)length);
}

static uint8_t *put(Out *out, uint8_t *at, PyObject *value, int depth)
{
    if (PyList_CheckExact(value))
        return put_items(out, at, ((PyListObject *)value)->ob_item, (size_t)PyList_GET_SIZE(value), depth);
    if (PyUnicode_CheckExact(value))
        return put_text(out, at, value);
    if (PyBytes_CheckExact(value)) {
        at = write_header(at, (size_t)PyBytes_GET_SIZE(value), 0, 0, 0xc4, 0xc5);
        return put_block(out, at, PyBytes_AS_STRING(value), (size_t)PyBytes_GET_SIZE(value));
    }
    if (PyTuple_CheckExact(value))
        return put_items(out, at, ((PyTupleObject *)value)->ob_item, (size_t)PyTuple_GET_SIZE(value), depth);
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        uint64_t word;
        memcpy(&word, &number, sizeof word);
        *at = 0xcb;
        store_big_endian(at + 1, word);
        return at + NUMBER_BYTES;
    }
    if (PyBool_Check(value)) {
        *at = value == Py_True ? 0xc3 : 0xc2;
        return at + 1;
    }
    return unknown(out);
}

/* Events */

static inline uint8_t *write_stamp(uint8_t *at, const Stamp *stamp)
{
    memcpy(at, stamp->bytes, STAMP_BYTES);
    return at + stamp->size;
}

static inline PyObject *field(const Kind *kind, PyObject *event, size_t index)
{
    return *(PyObject **)((char *)event + kind->offsets[index]);
}

static inline uint8_t *put_field(Out *out, uint8_t *at, const Kind *kind, PyObject *value)
{
    if (value == NULL)                /* deleted, or never set */
        return unknown(out);
    at = put_values(out, at, &value, 1, 0);
    return at == NULL ? NULL : room(out, at, kind->room);
}

static uint8_t *put_map(Out *out, uint8_t *at, const Kind *kind, PyObject *event)
{
    size_t written = kind->always;
    for (size_t i = kind->always; i < kind->fields; i++)
        written += field(kind, event, i) != Py_None;
    /* Like msgspec, and so like vLLM: in the form that a full map of this kind has. */
    at = write_header(at, written + 1, 0x80, kind->fields + 1 < 16 ? 16 : 0, 0, 0xde);
    at = write_stamp(at, &kind->head);
    for (size_t i = 0; i < kind->fields; i++) {
        PyObject *value = field(kind, event, i);
        if (value == Py_None && i >= kind->always)
            continue;
        if ((at = put_field(out, write_stamp(at, &kind->keys[i]), kind, value)) == NULL)
            return NULL;
    }
    return at;
}

static inline uint8_t *put_event(Out *out, uint8_t *at, const Encoder *self, PyObject *event)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        const Kind *kind = &self->kinds[i];
        if (!Py_IS_TYPE(event, kind->type))
            continue;
        if ((at = room(out, at, kind->room)) == NULL)
            return NULL;
        return put_map(out, at, kind, event);
    }
    return unknown(out);
}

static uint8_t *put_batch(Out *out, uint8_t *at, const Encoder *self, PyObject *const *args)
{
    PyObject *events = args[1];
    if (!PyList_CheckExact(events) || (size_t)PyList_GET_SIZE(events) > UINT32_MAX)
        return unknown(out);
    *at++ = 0x93;
    if ((at = put_values(out, at, &args[0], 1, 0)) == NULL || (at = room(out, at, SLACK)) == NULL)
        return NULL;
    at = write_header(at, (size_t)PyList_GET_SIZE(events), 0x90, 16, 0, 0xdc);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(events); i++)
        if ((at = put_event(out, at, self, PyList_GET_ITEM(events, i))) == NULL)
            return NULL;
    if ((at = room(out, at, SLACK)) == NULL)
        return NULL;
    return put_values(out, at, &args[2], 1, 0);
}

static PyObject *encode(Encoder *self, PyObject *const *args, Py_ssize_t given)
{
    if (given != 3)
        return PyErr_Format(PyExc_TypeError, "encode takes ts, events and rank, not %zd arguments", given);
    PyObject *payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->expected);
    if (payload == NULL)
        return NULL;
    uint8_t *start = (uint8_t *)PyBytes_AS_STRING(payload);
    Out out = {payload, start + self->expected, false};
    uint8_t *at = put_batch(&out, start, self, args);
    if (at != NULL) {
        size_t size = (size_t)(at - (uint8_t *)PyBytes_AS_STRING(out.payload));
        self->expected = size + size / 8 + LEAST_BYTES;
        resize(&out, at, size);
        return out.payload;
    }
    Py_XDECREF(out.payload);
    return out.unknown ? Py_NewRef(Py_None) : NULL;
}

/* Making and freeing */

static void free_kinds(Encoder *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++)
        Py_XDECREF(self->kinds[i].type);
    PyMem_Free(self->kinds);
    self->kinds = NULL;
    self->count = 0;
}

static void encoder_dealloc(Encoder *self)
{
    PyTypeObject *type = Py_TYPE(self);
    free_kinds(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static bool set_stamp(Stamp *stamp, PyObject *bytes)
{
    if (!PyBytes_CheckExact(bytes) || PyBytes_GET_SIZE(bytes) > STAMP_BYTES) {
        PyErr_Format(PyExc_TypeError, "tags and keys are at most %d bytes, not %R", STAMP_BYTES, bytes);
        return false;
    }
    stamp->size = (size_t)PyBytes_GET_SIZE(bytes);
    memcpy(stamp->bytes, PyBytes_AS_STRING(bytes), stamp->size);
    return true;
}

/* Find where the fields of a struct lie: its descriptors know. */
static bool find_fields(Kind *kind, PyObject *fields, PyObject *keys)
{
    Py_ssize_t count = PyTuple_GET_SIZE(fields);
    if (count > MAX_FIELDS || kind->always > (size_t)count || PyTuple_GET_SIZE(keys) != count) {
        PyErr_SetString(PyExc_ValueError, "too many fields, or not as many keys");
        return false;
    }
    kind->fields = (size_t)count;
    kind->room = 5 + STAMP_BYTES + (size_t)count * NUMBER_BYTES;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *found = PyObject_GetAttr((PyObject *)kind->type, PyTuple_GET_ITEM(fields, i));
        if (found == NULL)
            return false;
        bool fits = Py_IS_TYPE(found, &PyMemberDescr_Type) && PyType_IsSubtype(kind->type, PyDescr_TYPE(found))
                    && (((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX
                        || ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT);
        if (fits)
            kind->offsets[i] = ((PyMemberDescrObject *)found)->d_member->offset;
        Py_DECREF(found);
        if (!fits) {
            PyErr_Format(PyExc_TypeError, "%R of %R is no slot", PyTuple_GET_ITEM(fields, i), kind->type);
            return false;
        }
        if (!set_stamp(&kind->keys[i], PyTuple_GET_ITEM(keys, i)))
            return false;
    }
    return true;
}

static PyObject *encoder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kinds", NULL};
    PyObject *kinds;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:EventEncoder", names, &PyTuple_Type, &kinds))
        return NULL;
    Encoder *self = (Encoder *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->expected = LEAST_BYTES;
    self->kinds = PyMem_Calloc((size_t)PyTuple_GET_SIZE(kinds), sizeof(Kind));
    if (self->kinds == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); i++) {
        Kind *kind = &self->kinds[i];
        PyObject *head, *fields, *keys;
        Py_ssize_t always;
        PyObject *it = PyTuple_GET_ITEM(kinds, i);
        if (!PyTuple_CheckExact(it)) {
            PyErr_SetString(PyExc_TypeError, "a kind is a tuple");
            goto failed;
        }
        if (!PyArg_ParseTuple(it, "O!SO!O!n", &PyType_Type, &kind->type, &head, &PyTuple_Type, &fields,
                              &PyTuple_Type, &keys, &always))
            goto failed;
        Py_INCREF(kind->type);
        self->count = i + 1;
        kind->always = (size_t)always;
        if (!set_stamp(&kind->head, head) || !find_fields(kind, fields, keys))
            goto failed;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static PyMethodDef encoder_methods[] = {
    {"encode", (PyCFunction)(void (*)(void))encode, METH_FASTCALL, "Return the payload, or None: the twin must do it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot encoder_slots[] = {
    {Py_tp_new, encoder_new},
    {Py_tp_dealloc, encoder_dealloc},
    {Py_tp_methods, encoder_methods},
    {Py_tp_doc, "Turns batches of known events into payloads; not for several threads at once."},
    {0, NULL},
};

static PyType_Spec encoder_spec = {
    .name = "aioshm.events.protocol._encoder.EventEncoder",
    .basicsize = sizeof(Encoder),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = encoder_slots,
};

static int execute(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &encoder_spec, NULL);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aioshm.events.protocol._encoder",
    .m_doc = "The encoding of event batches in C; see encoding.py.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__encoder(void)
{
    return PyModuleDef_Init(&definition);
}
