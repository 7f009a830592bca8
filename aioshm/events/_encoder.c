/* Event batches to msgpack in C11: the bytes that the twin in encoding.py makes, in a third of its time.
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
#define SLACK 16               /* what every value has room for without asking: a number or a header, and a whole word */
#define LEAST_BYTES 512

typedef enum { FAILED = -1, DONE, UNKNOWN } Result;

/* One type of event: what stands in front of it, and where its fields are. */
typedef struct {
    PyTypeObject *type;
    PyObject *head;                   /* the tag, encoded; in a map its key, too */
    size_t fields, always;            /* all of them; how many are written even if they are None */
    Py_ssize_t offsets[MAX_FIELDS];
    PyObject *keys[MAX_FIELDS];       /* encoded; of maps only */
} Kind;

typedef struct {
    PyObject_HEAD
    bool maps;
    Py_ssize_t count;
    Kind *kinds;
    size_t expected;                  /* bytes of the next payload: about as many as the last one had */
} Encoder;

/* A payload while it is written: of `size` bytes, of which those before `at` are set. */
typedef struct {
    PyObject *payload;
    uint8_t *at, *end;
} Out;

/* Output. Every function leaves SLACK bytes of room behind. */

/* Make the payload `size` bytes long; on an error there is none any more. */
static bool resize(Out *out, size_t size)
{
    size_t used = (size_t)(out->at - (uint8_t *)PyBytes_AS_STRING(out->payload));
    if (_PyBytes_Resize(&out->payload, (Py_ssize_t)size) < 0)
        return false;
    out->at = (uint8_t *)PyBytes_AS_STRING(out->payload) + used;
    out->end = (uint8_t *)PyBytes_AS_STRING(out->payload) + size;
    return true;
}

static bool grow(Out *out, size_t amount)
{
    size_t size = (size_t)PyBytes_GET_SIZE(out->payload);
    if (amount > PY_SSIZE_T_MAX / 2 - size) {
        PyErr_NoMemory();
        return false;
    }
    return resize(out, size + (amount > size ? amount : size));
}

static inline bool room(Out *out, size_t amount)
{
    return (size_t)(out->end - out->at) >= amount + SLACK || grow(out, amount + SLACK);
}

static inline void store_big_endian(uint8_t *at, uint64_t word)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    memcpy(at, &word, sizeof word);
}

/* A number below 2**32 in 1, 2, 3 or 5 bytes; writes 8. Returns where the next value goes. */
static inline uint8_t *write_small(uint8_t *at, uint32_t number)
{
    static const struct { uint64_t prefix; uint32_t shift, bytes; } forms[] = {  /* by the place of the highest bit */
        [0 ... 6] = {0, 56, 1},
        [7] = {UINT64_C(0xcc) << 56, 48, 2},
        [8 ... 15] = {UINT64_C(0xcd) << 56, 40, 3},
        [16 ... 31] = {UINT64_C(0xce) << 56, 24, 5},
    };
    int highest = 31 ^ __builtin_clz(number | 1);
    store_big_endian(at, forms[highest].prefix | (uint64_t)number << forms[highest].shift);
    return at + forms[highest].bytes;
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
 * `form` the one with 8 bits, or 0 where there is none; then come those with 16 and 32. */
static inline void put_header(Out *out, size_t length, uint8_t fixed, size_t below, uint8_t form8, uint8_t form16)
{
    uint8_t *at = out->at;
    if (length < below) {
        *at = (uint8_t)(fixed | length);
        out->at += 1;
    } else if (form8 && length <= 0xff) {
        at[0] = form8, at[1] = (uint8_t)length;
        out->at += 2;
    } else if (length <= 0xffff) {
        at[0] = form16;
        store_big_endian(at + 1, (uint64_t)length << 48);
        out->at += 3;
    } else {
        at[0] = form16 + 1;
        store_big_endian(at + 1, (uint64_t)length << 32);
        out->at += 5;
    }
}

static bool put_raw(Out *out, const void *bytes, size_t amount)
{
    if (!room(out, amount))
        return false;
    memcpy(out->at, bytes, amount);
    out->at += amount;
    return true;
}

static Result put_block(Out *out, const void *bytes, size_t amount)
{
    if (amount > UINT32_MAX)
        return UNKNOWN;
    return put_raw(out, bytes, amount) ? DONE : FAILED;
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

static Result put_number(Out *out, PyObject *number)
{
    uint32_t small;
    if (single_digit(number, &small)) {
        out->at = write_small(out->at, small);
        return DONE;
    }
#if PY_VERSION_HEX < 0x030C0000 && PYLONG_BITS_IN_DIGIT == 30
    const digit *digits = ((PyLongObject *)number)->ob_digit;
    Py_ssize_t count = Py_SIZE(number);
    if (count == 2 || (count == 3 && digits[2] < 16)) {
        uint64_t value = digits[0] | (uint64_t)digits[1] << 30;
        out->at = write_number(out->at, count == 3 ? value | (uint64_t)digits[2] << 60 : value);
        return DONE;
    }
#endif
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {  /* negative, or above 64 bits */
        PyErr_Clear();
        return UNKNOWN;
    }
    out->at = write_number(out->at, value);
    return DONE;
}

/* Values */

static Result put(Out *out, PyObject *value, int depth);

static Result put_items(Out *out, PyObject *const *items, size_t count, int depth)
{
    if (count > UINT32_MAX || depth == MAX_DEPTH)
        return UNKNOWN;
    put_header(out, count, 0x90, 16, 0, 0xdc);
    if (!room(out, count * NUMBER_BYTES))
        return FAILED;
    for (size_t i = 0; i < count; i++) {
        uint8_t *at = out->at;        /* in a register while numbers follow each other */
        uint32_t small;
        while (i < count && PyLong_CheckExact(items[i]) && single_digit(items[i], &small)) {
            at = write_small(at, small);
            i++;
        }
        out->at = at;
        if (i == count)
            break;
        Result result = put(out, items[i], depth + 1);
        if (result != DONE)
            return result;
        if (!room(out, (count - i) * NUMBER_BYTES))
            return FAILED;
    }
    return DONE;
}

static Result put_text(Out *out, PyObject *text)
{
    Py_ssize_t length;
    const void *bytes;
    if (PyUnicode_IS_COMPACT_ASCII(text)) {
        bytes = PyUnicode_1BYTE_DATA(text);
        length = PyUnicode_GET_LENGTH(text);
    } else if ((bytes = PyUnicode_AsUTF8AndSize(text, &length)) == NULL) {
        if (PyErr_ExceptionMatches(PyExc_MemoryError))
            return FAILED;
        PyErr_Clear();                /* lone surrogates */
        return UNKNOWN;
    }
    put_header(out, (size_t)length, 0xa0, 32, 0xd9, 0xda);
    return put_block(out, bytes, (size_t)length);
}

static Result put_float(Out *out, double number)
{
    uint64_t word;
    memcpy(&word, &number, sizeof word);
    *out->at = 0xcb;
    store_big_endian(out->at + 1, word);
    out->at += NUMBER_BYTES;
    return DONE;
}

/* Values start with SLACK bytes of room, and leave as much. */
static Result put(Out *out, PyObject *value, int depth)
{
    if (!room(out, SLACK))
        return FAILED;
    if (value == Py_None) {
        *out->at++ = 0xc0;
        return DONE;
    }
    if (PyLong_CheckExact(value))
        return put_number(out, value);
    if (PyList_CheckExact(value))
        return put_items(out, ((PyListObject *)value)->ob_item, (size_t)PyList_GET_SIZE(value), depth);
    if (PyUnicode_CheckExact(value))
        return put_text(out, value);
    if (PyBytes_CheckExact(value)) {
        put_header(out, (size_t)PyBytes_GET_SIZE(value), 0, 0, 0xc4, 0xc5);
        return put_block(out, PyBytes_AS_STRING(value), (size_t)PyBytes_GET_SIZE(value));
    }
    if (PyTuple_CheckExact(value))
        return put_items(out, ((PyTupleObject *)value)->ob_item, (size_t)PyTuple_GET_SIZE(value), depth);
    if (PyFloat_CheckExact(value))
        return put_float(out, PyFloat_AS_DOUBLE(value));
    if (PyBool_Check(value)) {
        *out->at++ = value == Py_True ? 0xc3 : 0xc2;
        return DONE;
    }
    return UNKNOWN;
}

/* Events */

static inline PyObject *field(const Kind *kind, PyObject *event, size_t index)
{
    return *(PyObject **)((char *)event + kind->offsets[index]);
}

static Result put_array(Out *out, const Kind *kind, PyObject *event)
{
    size_t end = kind->fields;
    while (end > kind->always && field(kind, event, end - 1) == Py_None)
        end--;
    put_header(out, end + 1, 0x90, 16, 0, 0xdc);
    if (!put_raw(out, PyBytes_AS_STRING(kind->head), (size_t)PyBytes_GET_SIZE(kind->head)))
        return FAILED;
    for (size_t i = 0; i < end; i++) {
        PyObject *value = field(kind, event, i);
        Result result = value == NULL ? UNKNOWN : put(out, value, 0);
        if (result != DONE)
            return result;
    }
    return DONE;
}

static Result put_map(Out *out, const Kind *kind, PyObject *event)
{
    size_t written = kind->always;
    for (size_t i = kind->always; i < kind->fields; i++)
        written += field(kind, event, i) != Py_None;
    /* Like msgspec, and so like the field: in the form that a full map of this kind has. */
    put_header(out, written + 1, 0x80, kind->fields + 1 < 16 ? 16 : 0, 0, 0xde);
    if (!put_raw(out, PyBytes_AS_STRING(kind->head), (size_t)PyBytes_GET_SIZE(kind->head)))
        return FAILED;
    for (size_t i = 0; i < kind->fields; i++) {
        PyObject *value = field(kind, event, i);
        if (value == NULL)
            return UNKNOWN;
        if (i >= kind->always && value == Py_None)
            continue;
        if (!put_raw(out, PyBytes_AS_STRING(kind->keys[i]), (size_t)PyBytes_GET_SIZE(kind->keys[i])))
            return FAILED;
        Result result = put(out, value, 0);
        if (result != DONE)
            return result;
    }
    return DONE;
}

static Result put_event(Out *out, const Encoder *self, PyObject *event)
{
    for (Py_ssize_t i = 0; i < self->count; i++)
        if (Py_IS_TYPE(event, self->kinds[i].type))
            return self->maps ? put_map(out, &self->kinds[i], event) : put_array(out, &self->kinds[i], event);
    return UNKNOWN;
}

static Result put_batch(Out *out, const Encoder *self, PyObject *ts, PyObject *events, PyObject *rank)
{
    if (!PyList_CheckExact(events) || (size_t)PyList_GET_SIZE(events) > UINT32_MAX)
        return UNKNOWN;
    *out->at++ = 0x93;
    Result result = put(out, ts, 0);
    if (result != DONE)
        return result;
    put_header(out, (size_t)PyList_GET_SIZE(events), 0x90, 16, 0, 0xdc);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(events); i++) {
        if (!room(out, SLACK))
            return FAILED;
        result = put_event(out, self, PyList_GET_ITEM(events, i));
        if (result != DONE)
            return result;
    }
    return put(out, rank, 0);
}

static PyObject *encode(Encoder *self, PyObject *const *args, Py_ssize_t given)
{
    if (given != 3)
        return PyErr_Format(PyExc_TypeError, "encode takes ts, events and rank, not %zd arguments", given);
    PyObject *payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->expected);
    if (payload == NULL)
        return NULL;
    uint8_t *start = (uint8_t *)PyBytes_AS_STRING(payload);
    Out out = {payload, start, start + self->expected};
    Result result = put_batch(&out, self, args[0], args[1], args[2]);
    if (result == DONE) {
        size_t size = (size_t)(out.at - (uint8_t *)PyBytes_AS_STRING(out.payload));
        self->expected = size + size / 8 + LEAST_BYTES;
        resize(&out, size);
        return out.payload;
    }
    Py_XDECREF(out.payload);
    return result == UNKNOWN ? Py_NewRef(Py_None) : NULL;
}

/* Making and freeing */

static void free_kinds(Encoder *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Py_XDECREF(self->kinds[i].type);
        Py_XDECREF(self->kinds[i].head);
        for (size_t k = 0; k < MAX_FIELDS; k++)
            Py_XDECREF(self->kinds[i].keys[k]);
    }
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

/* Find where the fields of a struct lie: its descriptors know. */
static bool find_fields(Kind *kind, PyObject *fields, PyObject *keys)
{
    Py_ssize_t count = PyTuple_GET_SIZE(fields);
    if (count > MAX_FIELDS || kind->always > (size_t)count || (keys != Py_None && PyTuple_GET_SIZE(keys) != count)) {
        PyErr_SetString(PyExc_ValueError, "too many fields, or not as many keys");
        return false;
    }
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
        if (keys != Py_None) {
            PyObject *key = PyTuple_GET_ITEM(keys, i);
            if (!PyBytes_CheckExact(key)) {
                PyErr_SetString(PyExc_TypeError, "keys are bytes");
                return false;
            }
            kind->keys[i] = Py_NewRef(key);
        }
    }
    kind->fields = (size_t)count;
    return true;
}

static PyObject *encoder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kinds", "maps", NULL};
    PyObject *kinds;
    int maps;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!p:EventEncoder", names, &PyTuple_Type, &kinds, &maps))
        return NULL;
    Encoder *self = (Encoder *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->maps = maps;
    self->expected = LEAST_BYTES;
    self->kinds = PyMem_Calloc((size_t)PyTuple_GET_SIZE(kinds), sizeof(Kind));
    if (self->kinds == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); i++) {
        Kind *kind = &self->kinds[i];
        PyObject *fields, *keys;
        Py_ssize_t always;
        PyObject *it = PyTuple_GET_ITEM(kinds, i);
        if (!PyTuple_CheckExact(it)) {
            PyErr_SetString(PyExc_TypeError, "a kind is a tuple");
            goto failed;
        }
        if (!PyArg_ParseTuple(it, "O!SO!On", &PyType_Type, &kind->type, &kind->head, &PyTuple_Type, &fields, &keys,
                              &always))
            goto failed;
        Py_INCREF(kind->type);
        Py_INCREF(kind->head);
        self->count = i + 1;
        kind->always = (size_t)always;
        if (maps != (keys != Py_None) || (maps && !PyTuple_CheckExact(keys))) {
            PyErr_SetString(PyExc_TypeError, "keys are a tuple for maps, None for arrays");
            goto failed;
        }
        if (!find_fields(kind, fields, keys))
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
    .name = "aioshm.events._encoder.EventEncoder",
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
    .m_name = "aioshm.events._encoder",
    .m_doc = "The encoding of event batches in C; see encoding.py.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__encoder(void)
{
    return PyModuleDef_Init(&definition);
}
