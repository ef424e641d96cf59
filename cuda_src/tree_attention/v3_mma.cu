// tree_attention/v3_mma.cu: tensor cores through mma.sync; the heads and nodes of a request share each key tile.
//
// Computes   out[n, h] = sum_j softmax_j(sm_scale * (q_nope[n, h].ckv[j] + q_pe[n, h].kpe[j])) ckv[j]
// Letters    as v1_three_phase.cu; a row is node * H + head; a row tile has 64 rows, a key tile KEYS keys; G blocks.
//            docs/v3_schedule.md explains piece, slot, cut and the other words of the schedule.
// Inputs     as v1_three_phase.cu, in 16-bit types; rows of the cache and of the queries start at multiples of 16
//            bytes when aligned is set
// Outputs    out T[B, N, H, C], lse float32[B, N, H] in nats: rows of a single piece; v3_merge.cu writes the others
//            partial_out float32[slots, 64, C], partial_score float32[slots, 64]: scratch, the results of pieces; rows
//            that the request does not have stay unwritten in partial_out
//            carry float32[G, 64, C]: scratch, sums of pieces longer than FOLD_KEYS; empty where no piece can be
//            cuts int4[B, ceil(N * H / 64)]: scratch, how a row tile was cut (cut_of in v3_schedule.cuh)
// Work       grid G, block 384, one block per SM, as it uses all registers; v3_schedule.cuh cuts the work.
//            Four score warps multiply 32 rows with half of the C + R dimensions each, partly from registers, swap
//            halves in pairs and do the softmax of 16 rows each. Eight value warps own 64 rows x C / 8 columns each,
//            and load. How they wait for each other: v3_layout.cuh.
// Numerics   float32 accumulation; weights are rounded to T before the second product, their sum is not. Base 2. The
//            maximum is left stale while scores exceed it by at most 8 (weights stay below 512), so most tiles rescale
//            nothing. At most 1,024 products of 16 keys are added to one accumulator before it is folded away. A tile
//            in which a hidden key may hold NaN or inf is weighed without tensor cores, where 0 * NaN would be NaN.
// Requires   C 64, 128, 256 or 512, R a multiple of 16; checked dtypes and shapes; scratch that starts at multiples of
//            16 bytes (out and lse may start anywhere)
// Versions   v2_split_kv: CUDA cores, any head size | v3_mma: this, sm_80 to sm_120, as products are the limit
// Speed      64 heads x 64 nodes x 131,072 keys: 382 TFLOP/s on an H200 (2026-11-30), where the tensor pipe is busy for
//            61 % of the time and shared memory for 65 %; docs/v3_log.md has the versions that were tried
// Reference  ddtree_cupy/tree_attention/reference.py
// Source     own layout; ldmatrix and mma fragments after the PTX ISA; online softmax arXiv 1805.02867; softmax beside
//            the products of another tile as in FlashAttention 3 (arXiv 2407.08608); the stale maximum after
//            FlashAttention 4
#include "common/ptx.cuh"
#include "common/softmax_state.cuh"
#include "tree_attention/v3_schedule.cuh"
#include "tree_attention/v3_scores.cuh"
#include "tree_attention/v3_values.cuh"

template <class T, int C, int R, int KEYS, int STAGES, int HELD>
__global__ void __launch_bounds__(THREADS, 1)
    tree_attention_v3(Queries<T> queries, Cache<const T> cache, T* __restrict__ out, float* __restrict__ lse,
                      float* __restrict__ partial_out, float* __restrict__ partial_score, float* __restrict__ carry,
                      int4* __restrict__ cuts, int B, float sm_scale, int keys, int tiles_per_slice, int aligned) {
  extern __shared__ __align__(128) uint4 shared[];  // whole lines, for the XOR of v3_layout.cuh
  __shared__ Piece<T> piece;
  const Tables tables = tables_of(queries, cache, B, keys, KEYS, tiles_per_slice);
  const int N = queries.N, H = queries.H, page_size = cache.page_size;
  {
    const Line line = line_of(tables, gridDim.x);
    if ((int)blockIdx.x >= line.main + line.blocks) return;
    if (threadIdx.x == 0) {
      const int part = (int)blockIdx.x - line.main;  // of the line, if it is not negative
      piece.grid = gridDim.x;
      piece.line = line;
      piece.index = part < 0 ? blockIdx.x : line.start(part);
      piece.stop = part < 0 ? line.main : line.start(part + 1);
      piece.put_off = piece.put_off_stop = -1;

      LoadPlan<T>& plan = piece.plan;
      plan.ckv = cache.ckv;
      plan.kpe = cache.kpe;
      plan.page_shift = (page_size & (page_size - 1)) == 0 ? __ffs(page_size) - 1 : -1;
      plan.last_page = cache.num_pages - 1;
      plan.page_stride = (int)cache.ckv_page_stride;
      plan.slot_stride = (int)cache.ckv_slot_stride;
      piece.strides = {cache.ckv_page_stride, cache.ckv_slot_stride, cache.kpe_page_stride, cache.kpe_slot_stride};
      piece.is_plain = aligned && plan.page_shift >= 0 && piece.strides.is_one_buffer(page_size);
      piece.H = H;
      piece.W = queries.words();
      piece.aligned = aligned != 0;
      piece.scale = sm_scale * LOG2_E;
      piece.carry = carry + (long long)blockIdx.x * TILE_ROWS * C;
    }
  }

  while (true) {
    __syncthreads();  // the piece before is done with shared memory
    const long long index = piece.index;
    if (index >= piece.stop) return;
    const bool is_main = (int)blockIdx.x < piece.line.main;
    const Place place = find_place(tables, piece.line, is_main, index);
    if (threadIdx.x == 0) {
      const Line& line = piece.line;
      const Request request = request_of(tables, place.request);
      const int whole = line.whole_of(request), end = line.end_of(request);
      const long long local = index - (is_main ? place.main : place.ends);
      const int of_tile = is_main ? whole : end;  // pieces, or units of the line
      const int row_tile = (int)(local / of_tile), rest = (int)(local % of_tile);
      const int first_unit = is_main ? rest * line.length : whole * line.length + rest;
      const int num_units = is_main ? line.length : (int)min(piece.stop - index, (long long)end - rest);
      const int per_unit = max(tiles_per_slice, 1);
      piece.is_put_off = !is_main && rest > 0 && index + num_units < piece.stop;
      if (piece.is_put_off) {
        piece.put_off = index;
        piece.put_off_stop = index + num_units;
      }
      piece.place = place;
      piece.request = request;

      LoadPlan<T>& plan = piece.plan;
      const int context_keys = min(request.range.context_len - request.range.first, request.range.count);
      plan.entries = request.table.entries;
      plan.plain_keys = piece.is_plain ? context_keys : 0;
      plan.first = request.range.first;
      plan.first_tile = first_unit * per_unit;
      plan.last_tile = min((first_unit + num_units) * per_unit, request.key_tiles);

      piece.bits = queries.bits(place.request, 0);
      piece.first_row = row_tile * TILE_ROWS;
      piece.row_tile = row_tile;
      piece.num_units = num_units;
      piece.is_whole = num_units == request.units;
      const long long first_row = (long long)place.request * N * H + piece.first_row;
      const int number = place.main + row_tile * whole;  // of the first piece of whole length
      const int start_slot = start_slot_of(whole, number, blockIdx.x, piece.grid);
      const long long slot = is_main ? index : rest == 0 ? start_slot : blockIdx.x;
      piece.result = piece.is_whole ? first_row : slot * TILE_ROWS;
      piece.cut = first_unit == 0 ? cuts + (long long)place.request * row_tiles_of(N, H) + row_tile : nullptr;
    }
    __syncthreads();
    if (piece.is_put_off) {
      if (threadIdx.x == 0) piece.index = piece.put_off_stop;
      continue;
    }
    char* const space = reinterpret_cast<char*>(shared);
    if (threadIdx.x < VALUE_THREADS) {
      ValueWarp<T, C, R, KEYS, STAGES, HELD> values(space, piece);
      values.attend(queries.nope(piece.place.request, 0, 0), queries.nope_node_stride, queries.nope_head_stride,
                    queries.pe(piece.place.request, 0, 0), queries.pe_node_stride, queries.pe_head_stride);
      if (piece.is_whole)
        values.write_result(out + piece.result * C);
      else
        values.write_partial(partial_out + piece.result * C);
    } else {
      ScoreWarp<T, C, R, KEYS, STAGES, HELD> scores(space, piece);
      scores.attend();
      if (piece.is_whole)
        scores.write_scores(lse + piece.result, piece.request.rows - piece.first_row, LN_2);
      else
        scores.write_scores(partial_score + piece.result, TILE_ROWS, 1.0f);
      if (piece.cut != nullptr && threadIdx.x == FIRST_SCORE_THREAD)
        *piece.cut = cut_of(piece.line, piece.place, piece.request, piece.row_tile);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      piece.index += (int)blockIdx.x < piece.line.main ? piece.grid : piece.num_units;
      if (piece.index >= piece.stop && piece.put_off >= 0) {
        piece.index = piece.put_off;
        piece.stop = piece.put_off_stop;
        piece.put_off = -1;
      }
    }
  }
}
