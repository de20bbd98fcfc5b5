/* What the two halves of the gated delta rule share: where a layer's state lies, and the tokens of one key head. */
#ifndef DELTASERVE_GDN_H
#define DELTASERVE_GDN_H

#include "kernels.h"

/* One layer's views of the pools. Strides count elements from one slot or ring row to the next. */
struct gdn_pool {
    void *states;
    float *windows, *ring_k, *ring_u, *ring_g, *conv_ring;
    int64_t state_kind, ring_width;
    int64_t state_stride, window_stride, k_stride, u_stride, g_stride, conv_stride;
};

struct gdn_sizes {
    int64_t key_heads, value_heads, key_dim, value_dim;
};

INLINE long group_of(const struct gdn_sizes *s) { return s->value_heads / s->key_heads; }

/* Consecutive tokens of one key head: token t has q and k at t * key_stride, v and o of the head's value heads, side by
 * side, at t * value_stride and t * o_stride, g and beta at t * gate_stride. */
struct head_tokens {
    const float *q, *k, *v, *g, *beta;
    long key_stride, value_stride, gate_stride;
    float *o;
    long o_stride;
};

INLINE struct head_tokens from_token(struct head_tokens x, long t) {
    x.q += t * x.key_stride, x.k += t * x.key_stride, x.v += t * x.value_stride;
    x.g += t * x.gate_stride, x.beta += t * x.gate_stride, x.o += t * x.o_stride;
    return x;
}

/* One token of key head j behind `num_ring` entries of a ring; appends its entry. */
long extend_scratch(const struct gdn_sizes *s);
void extend_token(const struct gdn_sizes *s, const struct gdn_pool *pool, long ring_row, long slot, long num_ring,
                  long j, struct head_tokens x, float *scratch);

/* Up to 64 tokens from a boundary. states [group, K, V] are the key head's value heads'; after 64 tokens they are those
 * of the next boundary, rounded as the pool keeps them. Fewer tokens are a row's last and go to its ring. */
long chunk_scratch(const struct gdn_sizes *s);
void prefill_chunk(const struct gdn_sizes *s, const struct gdn_pool *pool, long ring_row, long j, long num_tokens,
                   struct head_tokens x, float *states, float *scratch);
void load_states(const struct gdn_sizes *s, const struct gdn_pool *pool, long slot, long j, float *states);
void store_states(const struct gdn_sizes *s, const struct gdn_pool *pool, long slot, long j, const float *states);

INLINE long states_size(const struct gdn_sizes *s) {
    return round_up(group_of(s) * s->key_dim * s->value_dim, LANES);
}

/* The slots to which row `row` gives its state after `num_tokens`; `from` goes through the cuts, -1 at their end. */
INLINE long next_cut(const struct prefill_rows *rows, long row, long num_tokens, long *from) {
    for (; *from < rows->num_cuts; ++*from) {
        const int64_t *cut = rows->cuts + 3 * *from;
        if (cut[0] == row && cut[1] == num_tokens) return ++*from, cut[2];
    }
    return -1;
}

#endif
