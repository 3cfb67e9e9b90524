"""Device code that attention kernels share: visible keys, tiles of K and V, the online softmax, the merge of partial results.

For one block of query rows and the keys of one KV head, with s = scale * q k^T (after the softcap, if any):

    m = max_j s_j      l = sum_j exp(s_j - m)      acc = sum_j exp(s_j - m) v_j      out = acc / l

(m, l, acc) over disjoint sets of keys merge exactly (up to rounding), so a kernel only decides which program processes which
tiles. Exponents are in base 2: exp(x) = exp2(x * log2(e)), with log2(e) folded into the scale.

visibility.py computes the visible keys of a row, tile.py loads K and V, pages.py loads them from pages, online.py has the
softmax step, attend.py the loop over tiles, wide.py the loop for wide heads, merge.py stores and merges partial results,
rerotate.py re-rotates queries. Constants are default arguments of device code, because Triton compares every global that a
kernel reads at every launch.

Sources: Dao, "FlashAttention-2" (2023), section 3.1 and algorithm 1; Milakov and Gimelshein, "Online normalizer calculation for
softmax" (2018); Dao et al., "Flash-Decoding for long-context inference" (2023) for the merge.
"""
