/* A model whose next token is a hash of every token in the KV pool of its sequence: any wrong block, slot,
 * position or row changes the answer. Compiled together with team.c. */
#include "abi.h"

int64_t dt_abi(void) { return DT_ABI; }

/* T, ids, kv_slots, kpool (head_dim floats per slot), head_dim */
void dt_entry_toy_store(const dt_slot *s, const int64_t *schedule, int64_t tid, int64_t nth) {
  (void)schedule;
  const int32_t *ids = s[1].p;
  const int64_t *kv_slots = s[2].p;
  for (int64_t t = tid; t < s[0].i; t += nth) ((float *)s[3].p)[kv_slots[t] * s[4].i] = (float)ids[t];
}

/* n_out, vocab, out_rows, positions, n_prefill, n_decode, seq_starts, seq_lengths, block_tables, table_stride,
 * kpool, head_dim, logits, logits_stride */
void dt_entry_toy_logits(const dt_slot *s, const int64_t *schedule, int64_t tid, int64_t nth) {
  (void)schedule;
  const int32_t *rows = s[2].p, *positions = s[3].p, *starts = s[6].p, *lengths = s[7].p, *tables = s[8].p;
  const int64_t vocab = s[1].i, n_prefill = s[4].i;
  for (int64_t r = tid; r < s[0].i; r += nth) {
    int64_t sequence = 0;
    while (sequence < n_prefill && starts[sequence + 1] <= rows[r]) sequence++;
    if (sequence == n_prefill) sequence += rows[r] - starts[n_prefill];
    uint32_t hash = 17;
    for (int32_t i = 0; i <= positions[rows[r]]; i++) {
      int64_t block = tables[sequence * s[9].i + i / 16];
      hash = hash * 31 + (uint32_t)((float *)s[10].p)[(block * 16 + i % 16) * s[11].i] + 7;
    }
    int64_t best = lengths[sequence] > positions[rows[r]] ? hash % vocab : 0;
    float *logits = (float *)s[12].p + r * s[13].i;
    for (int64_t v = 0; v < vocab; v++) logits[v] = -0.1f * (float)((v - best + vocab) % vocab);
  }
}

/* The operands of SAMPLE_ARGS and the vocabulary size: argmax, or the uniform number's place in the vocabulary. */
void dt_entry_toy_sample(const dt_slot *s, const int64_t *schedule, int64_t tid, int64_t nth) {
  (void)schedule;
  const int64_t vocab = s[10].i;
  for (int64_t r = tid; r < s[0].i; r += nth) {
    const float *logits = (const float *)s[1].p + r * s[2].i;
    int64_t best = 0;
    for (int64_t v = 1; v < vocab; v++)
      if (logits[v] > logits[best]) best = v;
    if (((float *)s[3].p)[r] > 0) best = (int64_t)(((float *)s[7].p)[r] * (float)vocab);
    ((int32_t *)s[8].p)[r] = (int32_t)best;
    ((float *)s[9].p)[r] = logits[best];
  }
}
