/* The graph: shape rules good and bad, promotion, views and copies, the gradient pass's structure, pruning, the
 * verifier, the printer. */
#include "t.h"

#include "op_case.h"
#include "pass/pass.h"

/* ---- shape rules: the call, then the outputs' types or "!" and a part of the message ---- */
static const char *const rules[][2] = {
    /* elementwise */
    {"add f32[2,1,4] f32[3,1]", "f32[2,3,4]"},
    {"add f32[0,3] f32[1,3]", "f32[0,3]"},
    {"add f32[2,3] f32[4]", "!add: [2,3] and [4] do not broadcast: sizes 3 and 4 differ in dim -1"},
    {"add bool[2] bool[2]", "bool[2]"},
    {"sub f32[2] f32[2]", "f32[2]"},
    {"sub bool[2] bool[2]", "!sub: has no meaning for bool"},
    {"mul i32[2] f16[]", "f16[2]"},
    {"div i32[2] i32[2]", "f32[2]"},
    {"pow f32[2] f32[]", "f32[2]"},
    {"minimum u8[2] i32[2]", "i32[2]"},
    {"maximum f16[2] bf16[2]", "f32[2]"},
    {"eq f32[2] i64[2]", "bool[2]"},
    {"ne f32[2] f32[]", "bool[2]"},
    {"lt f32[2,1] f32[3]", "bool[2,3]"},
    {"le f32[2] f32[2]", "bool[2]"},
    {"gt f32[2] f32[2]", "bool[2]"},
    {"ge f32[2] f32[2]", "bool[2]"},
    {"where bool[2,1] f32[3] f32[]", "f32[2,3]"},
    {"where f32[2] f32[2] f32[2]", "!where: the condition is f32, but must be bool"},
    {"neg i32[2]", "i32[2]"},
    {"abs f32[2]", "f32[2]"},
    {"sign f32[2]", "f32[2]"},
    {"floor f32[2]", "f32[2]"},
    {"square f32[2]", "f32[2]"},
    {"reciprocal i64[2]", "f32[2]"},
    {"exp i64[2]", "f32[2]"},
    {"exp f64[]", "f64[]"},
    {"log f32[2]", "f32[2]"},
    {"sqrt bf16[2]", "bf16[2]"},
    {"rsqrt f32[2]", "f32[2]"},
    {"sin f32[2]", "f32[2]"},
    {"cos f32[2]", "f32[2]"},
    {"tanh f32[2]", "f32[2]"},
    {"sigmoid bool[2]", "f32[2]"},
    {"erf f32[2]", "f32[2]"},
    {"relu f32[2]", "f32[2]"},
    {"gelu f32[2]", "f32[2]"},
    {"gelu_tanh f32[2]", "f32[2]"},
    {"silu f32[2]", "f32[2]"},
    {"softplus f32[2]", "f32[2]"},
    {"clamp f32[2] min=0", "f32[2]"},
    {"isfinite f32[2]", "bool[2]"},
    {"relu_bwd f32[2] f32[2]", "f32[2]"},
    {"gelu_bwd f32[2] f32[2]", "f32[2]"},
    {"gelu_tanh_bwd f32[2] f32[2]", "f32[2]"},
    {"silu_bwd f32[2] f32[2]", "f32[2]"},
    {"tanh_bwd f32[2] f32[2]", "f32[2]"},
    {"sigmoid_bwd f32[2] f32[2]", "f32[2]"},
    {"clamp_bwd f32[2] f32[2] min=0", "f32[2]"},
    {"cast f32[2] dtype=bf16", "bf16[2]"},
    {"full value=3 dtype=i64 shape=[2,3]", "i64[2,3]"},
    {"full shape=[2,-3]", "!full: the shape [2,-3] has a negative size"},
    /* views */
    {"reshape f32[2,3] shape=[3,2]", "f32[3,2]"},
    {"reshape f32[2,3,4] shape=[-1,4]", "f32[6,4]"},
    {"reshape f32[] shape=[1,1]", "f32[1,1]"},
    {"reshape f32[2,3] shape=[4]", "!reshape: [2,3] has 6 elements, [4] needs 4"},
    {"reshape f32[2,3] shape=[-1,4]", "!reshape: [2,3] has 6 elements, which 4 does not divide"},
    {"reshape f32[2,3] shape=[-1,-1]", "!more than one -1"},
    {"permute f32[2,3,4] dims=[2,0,-2]", "f32[4,2,3]"},
    {"permute f32[2,3] dims=[0,0]", "!permute: dim 0 is named twice"},
    {"permute f32[2,3] dims=[0]", "!permute: [2,3] has 2 dims, but 1 are named"},
    {"slice f32[5,7] dim=-1 start=1 stop=6 step=2", "f32[5,3]"},
    {"slice f32[5,7] dim=0 start=-2", "f32[2,7]"},
    {"slice f32[5] dim=0 start=4 stop=2", "f32[0]"},
    {"slice f32[5] dim=1", "!slice: [5] has no dim 1; its dims are 0 to 0"},
    {"slice f32[5] dim=0 step=0", "!step is 0"},
    {"slice f32[] dim=0", "!a scalar has no dims"},
    {"broadcast_to f32[3,1] shape=[2,-1,4]", "f32[2,3,4]"},
    {"broadcast_to f32[3] shape=[2]", "!broadcast_to: [3] does not broadcast to [2]: size 3 is neither 2 nor 1"},
    {"broadcast_to f32[2,3] shape=[3]", "!has more dims than"},
    {"split f32[2,6] dim=1 sizes=[1,2,3]", "f32[2,1] f32[2,2] f32[2,3]"},
    {"split f32[2,6] dim=1 sizes=[1,2]", "!split: the sizes [1,2] add up to 3, but dim 1 of [2,6] has 6"},
    {"stop_gradient i32[2]", "i32[2]"},
    /* data movement */
    {"copy bf16[2]", "bf16[2]"},
    {"concat f32[2,3] f32[2,4] dim=-1", "f32[2,7]"},
    {"concat f32[2,3] f32[3,4] dim=1", "!concat: [2,3] and [3,4] differ in more than dim 1"},
    {"concat f32[2,3] f16[2,3]", "!concat: input 1 is f32 and input 2 is f16; convert one with :to \"f32\""},
    {"pad f32[2,3] before=[0,1] after=[2,0]", "f32[4,4]"},
    {"pad f32[2,3] before=[0] after=[2,0]", "!pad: [2,3] has 2 dims, but before has 1 numbers"},
    {"pad f32[2] before=[-1] after=[0]", "!must not be negative"},
    {"arange stop=5", "i64[5]"},
    {"arange start=0 stop=1 step=0.3 dtype=f32", "f32[4]"},
    {"arange start=5 stop=1", "i64[0]"},
    {"arange stop=5 step=0", "!arange: step must not be 0"},
    /* reductions */
    {"sum f32[2,3,4] dims=[0,-1]", "f32[3]"},
    {"sum i32[2,3]", "i64[]"},
    {"sum bool[2,3] dims=[1] keepdim=1", "i64[2,1]"},
    {"sum f32[2,3] dims=[2]", "!sum: [2,3] has no dim 2; its dims are 0 to 1, or -2 to -1"},
    {"sum f32[2,3] dims=[1,-1]", "!dim 1 is named twice"},
    {"mean f32[2,3] keepdim=1", "f32[1,1]"},
    {"mean i64[2,3]", "!mean: input 1 is i64, but must be a float; convert it with :to \"f32\""},
    {"max i32[2,3] dims=[0]", "i32[3]"},
    {"min f32[0,3] dims=[0]", "!min: [0,3] has no elements along the reduced dims"},
    {"min f32[2,3]", "f32[]"},
    {"norm f32[2,3] dims=[1]", "f32[2]"},
    {"argmax f32[2,3]", "i64[2]"},
    {"argmax f32[2,3] dim=0 keepdim=1", "i64[1,3]"},
    {"argmax f32[2,0]", "!argmax: [2,0] has no elements along dim 1"},
    {"sum_squares f32[2,3] f32[4]", "f64[]"},
    {"sum_squares i32[2]", "!sum_squares: input 1 is i32"},
    {"cumsum f32[2,3] dim=-1", "f32[2,3]"},
    {"cumsum i32[2,3] dim=0", "i64[2,3]"},
    {"cumsum f32[2,3] dim=2", "!cumsum: [2,3] has no dim 2"},
    {"softmax f32[2,3]", "f32[2,3]"},
    {"softmax i64[2,3]", "!softmax: input 1 is i64"},
    {"topk i64[2,3] k=2", "i64[2,2] i64[2,2]"},
    {"topk bool[3] k=2", "!topk: has no meaning for bool"},
    {"clamp i64[2] min=0.5", "!clamp: min is 0.5, but the tensor is i64"},
    {"softmax_bwd f32[2,3] f32[2,3]", "f32[2,3]"},
    {"log_softmax f32[2,3] dim=0", "f32[2,3]"},
    {"log_softmax_bwd f32[2,3] f32[2,3]", "f32[2,3]"},
    /* products */
    {"matmul f32[2,3] f32[3,4]", "f32[2,4]"},
    {"matmul f32[5,1,2,3] f32[6,4,3] tb=1", "f32[5,6,2,4]"},
    {"matmul f32[3,2] f32[3,4] ta=1", "f32[2,4]"},
    {"matmul f32[2,3] f32[4,5]", "!matmul: [2,3] by [4,5]: inner sizes 3 and 4 differ; transpose one or reshape"},
    {"matmul f32[3] f32[3,4]", "!both need 2 dims or more"},
    {"matmul f32[2,3] bf16[3,4]", "!input 1 is f32 and input 2 is bf16; convert one with :to \"f32\""},
    {"matmul f32[2,2,3] f32[4,3,4]", "!do not broadcast"},
    {"linear f32[7,2,3] f32[4,3]", "f32[7,2,4]"},
    {"linear f32[3] f32[4,3] f32[4] bias=1", "f32[4]"},
    {"linear f32[2,3] f32[4,5]", "!linear: the input [2,3] must end in 5, the second size of the weight [4,5]"},
    {"linear f32[2,3] f32[4,3] f32[3] bias=1", "!linear: the bias is f32[3], but must be f32[4]"},
    {"linear f32[2,3] f32[4,3] bias=1", "!linear: 2 inputs, but bias=1 needs 3"},
    /* attention */
    {"attention f32[2,6,5,8] f32[2,3,7,8] f32[2,3,7,8] causal=1", "f32[2,6,5,8] f32[2,6,5]"},
    {"attention bf16[2,5,6,8] bf16[2,7,3,8] bf16[2,7,3,8] bthd=1", "bf16[2,5,6,8] f32[2,6,5]"},
    {"attention f32[2,6,5,8] f32[2,4,7,8] f32[2,4,7,8]", "!attention: 6 query heads do not divide by 4 key heads"},
    {"attention f32[2,6,5,8] f32[2,6,7,4] f32[2,6,7,4]", "!must have equal batch (2, 2) and head size (8, 4)"},
    {"attention f32[2,6,8] f32[2,6,8] f32[2,6,8]", "!must have 4 dims, [batch, heads, length, size]"},
    {"attention f32[2,6,9,8] f32[2,6,7,8] f32[2,6,7,8] causal=1", "!causal with 9 queries but only 7 keys"},
    {"attention_bwd f32[2,6,5,8] f32[2,3,7,8] f32[2,3,7,8] f32[2,6,5,8] f32[2,6,5] f32[2,6,5,8]",
     "f32[2,6,5,8] f32[2,3,7,8] f32[2,3,7,8]"},
    {"attention_bwd f32[2,6,5,8] f32[2,3,7,8] f32[2,3,7,8] f32[2,6,5,8] f32[2,6] f32[2,6,5,8]",
     "!attention_bwd: lse is f32[2,6], but must be f32[2,6,5]"},
    {"rotary f32[2,3,5,8]", "f32[2,3,5,8]"},
    {"rotary f32[2,3,5,7]", "!rotary: the head size 7 is odd"},
    /* lookups */
    {"embedding i64[2,5] f32[11,4]", "f32[2,5,4]"},
    {"embedding f32[2,5] f32[11,4]",
     "!embedding: the ids are f32, but must be integers; convert them with :to \"i64\""},
    {"embedding_bwd u8[2,5] f32[2,5,4] rows=11", "f32[11,4]"},
    {"embedding_bwd u8[2,5] f32[2,4,4] rows=11", "!embedding_bwd: the gradient is f32[2,4,4], but must be f32[2,5,4]"},
    {"gather f32[3,4] i64[3,2]", "f32[3,2]"},
    {"gather f32[3,4] i64[4,2]",
     "!gather: the index [4,2] must have as many dims as [3,4] and, but for dim 1, no larger sizes"},
    {"scatter_add i64[3,2] f32[3,2] dim=1 shape=[3,4]", "f32[3,4]"},
    {"scatter_add i64[3,2] f32[3,3] dim=1 shape=[3,4]", "!scatter_add: the source (of the index's shape) is f32[3,3]"},
    {"one_hot i64[2,3] classes=5 dtype=f32", "f32[2,3,5]"},
    {"one_hot i64[2,3] classes=0", "!one_hot: classes is 0"},
    {"topk f32[3,7] k=2", "f32[3,2] i64[3,2]"},
    {"topk f32[3,7] k=8", "!topk: k is 8, but the last dim of [3,7] has 7 elements; 1 to 7 would do"},
    {"pack_signs f32[17]", "u8[3]"},
    {"pack_signs f32[4,4]", "!pack_signs: [4,4] is no vector"},
    {"unpack_signs u8[2,3]", "f32[2,24]"},
    {"unpack_signs f32[3]", "!unpack_signs: [3] is not what pack_signs gives"},
    /* norms */
    {"layer_norm f32[2,5,4]", "f32[2,5,4] f32[10] f32[10]"},
    {"layer_norm bf16[2,5,4] bf16[5,4] bf16[5,4] dims=2", "bf16[2,5,4] f32[2] f32[2]"},
    {"layer_norm f64[2,4] f64[4]", "f64[2,4] f64[2] f64[2]"},
    {"layer_norm f32[2,4] f32[5]", "!layer_norm: the weight is f32[5], but must be f32[4]"},
    {"layer_norm f32[4] dims=2", "!layer_norm: dims is 2, but [4] has 1"},
    {"layer_norm_bwd f32[2,4] f32[2,4] f32[4] f32[2] f32[2]", "f32[2,4] f32[4] f32[4]"},
    {"layer_norm_bwd f32[2,4] f32[2,4] f32[4] f32[3] f32[2]", "!the mean is f32[3], but must be f32[2]"},
    {"rms_norm f32[2,5,4] f32[4]", "f32[2,5,4] f32[10]"},
    {"rms_norm f32[2,4] f32[2]", "!rms_norm: the weight is f32[2], but must be f32[4]"},
    {"rms_norm_bwd f32[2,4] f32[2,4] f32[4] f32[2]", "f32[2,4] f32[4]"},
    {"rms_norm_bwd f32[2,4] f32[2,3] f32[3] f32[2]", "!the output's gradient is f32[2,4], but must be f32[2,3]"},
    {"batch_norm f32[2,3,5,5] f32[3] f32[3] f32[3] f32[3]", "f32[2,3,5,5] f32[3] f32[3]"},
    {"batch_norm f32[2,3,5,5] f32[3] f32[3] f32[4] f32[3]",
     "!batch_norm: the running mean is f32[4], but must be f32[3]"},
    {"batch_norm f32[2] f32[3] f32[3] f32[4] f32[3]", "!must be [batch, channels, ...]"},
    {"batch_norm_bwd f32[2,3] f32[2,3] f32[3] f32[3] f32[3]", "f32[2,3] f32[3] f32[3]"},
    {"batch_norm_bwd f32[2,3] f32[2,3] f32[2] f32[3] f32[3]",
     "!batch_norm_bwd: the weight is f32[2], but must be f32[3]"},
    /* images */
    {"conv2d f32[2,4,9,9] f32[6,2,3,3] f32[6] stride=2 padding=1,0 dilation=1,2 groups=2", "f32[2,6,5,3]"},
    {"conv2d f32[2,4,9,9] f32[6,3,3,3]",
     "!conv2d: the weight [6,3,3,3] is for 3 input channels, but the input [2,4,9,9] has 4"},
    {"conv2d f32[2,4,9,9] f32[6,4,3,3] groups=3", "!do not divide by 3 groups"},
    {"conv2d f32[2,4,2,9] f32[6,4,3,3]", "!a window of 3 does not fit into 2 with padding 0"},
    {"conv2d f32[2,4,9,9] f32[6,4,3,3] stride=0", "!stride 0"},
    {"conv2d_bwd_x f32[2,6,7,7] f32[6,4,3,3] shape=[2,4,9,9]", "f32[2,4,9,9]"},
    {"conv2d_bwd_x f32[2,6,7,7] f32[6,4,3,3] shape=[2,4,9,8]", "!is f32[2,6,7,7], but must be f32[2,6,7,6]"},
    {"conv2d_bwd_w f32[2,6,7,7] f32[2,4,9,9] shape=[6,4,3,3]", "f32[6,4,3,3]"},
    {"conv2d_bwd_w f32[2,6,7,7] f32[2,4,9,9] shape=[5,4,3,3]", "!is f32[2,6,7,7], but must be f32[2,5,7,7]"},
    {"max_pool2d f32[2,3,8,9] kernel=2", "f32[2,3,4,4] i32[2,3,4,4]"},
    {"max_pool2d f32[2,3,8,8] kernel=2 padding=2", "!max_pool2d: padding 2 is more than half of the kernel 2"},
    {"max_pool2d f32[2,8,8] kernel=2", "!must be [batch, channels, height, width]"},
    {"max_pool2d_bwd f32[2,3,4,4] i32[2,3,4,4] shape=[2,3,8,8]", "f32[2,3,8,8]"},
    {"max_pool2d_bwd f32[2,3,4,4] i64[2,3,4,4] shape=[2,3,8,8]",
     "!the index is i64[2,3,4,4], but must be i32[2,3,4,4]"},
    {"avg_pool2d f32[2,3,8,8] kernel=3 stride=1 padding=1", "f32[2,3,8,8]"},
    {"avg_pool2d f32[2,3,2,8] kernel=3", "!a window of 3 does not fit into 2"},
    {"avg_pool2d_bwd f32[2,3,4,4] kernel=2 shape=[2,3,8,8]", "f32[2,3,8,8]"},
    {"avg_pool2d_bwd f32[2,3,4,4] kernel=2 shape=[2,3,8,6]", "!is f32[2,3,4,4], but must be f32[2,3,4,3]"},
    /* random, losses, training */
    {"dropout f32[2,3] p=0.1", "f32[2,3]"},
    {"random f32[2,3]", "f32[2,3]"},
    {"random i32[2]", "!random: input 1 is i32"},
    {"dropout f32[2,3] p=1.5", "!dropout: p is 1.5, but must lie between 0 and 1"},
    {"cross_entropy bf16[2,5,11] i64[2,5]", "f32[] f32[] f32[10]"},
    {"cross_entropy f64[11] i64[]", "f64[] f64[] f64[1]"},
    {"cross_entropy f32[2,5,11] i64[2,6]", "!cross_entropy: labels [2,6] do not fit logits [2,5,11]"},
    {"cross_entropy f32[2,11] f32[2]", "!cross_entropy: the labels are f32, but must be integers"},
    {"vocab_stats bf16[2,5,11] i64[2,5] base=0 classes=22", "f32[10] f32[10] f32[10] f32[10]"},
    {"vocab_stats f32[2,11] i64[3] base=0 classes=22", "!vocab_stats: labels [3] do not fit logits [2,11]"},
    {"vocab_loss f32[2,11] i64[2] f32[2] f32[2] f32[2] base=0 classes=22", "f32[] f32[]"},
    {"vocab_loss f32[2,11] i64[2] f32[3] f32[2] f32[2] base=0 classes=22",
     "!vocab_loss: lse is f32[3], but must be f32[2]"},
    {"place f32[4,6] axis=1 sharded=1 dim=-1", "f32[4,6]"},
    {"place f32[4] axis=1 sharded=1 dim=1", "!place: [4] has no dim 1"},
    {"enter f32[4] axes=1", "f32[4]"},
    {"cross_entropy_bwd f32[2,11] i64[2] f32[2] f32[] f32[]", "f32[2,11]"},
    {"cross_entropy_bwd f32[2,11] i64[2] f32[3] f32[] f32[]", "!cross_entropy_bwd: lse is f32[3], but must be f32[2]"},
    {"accum_grad f32[2] f32[2] f32[2]", "f32[2]"},
    {"accum_grad f32[2] f32[3]", "!an input is f32[3], but must be f32[2]"},
    {"pack f32[2,3] f32[4] begin=16 end=32", "f32[16]"},
    {"pack f32[2,3] f32[4] begin=0 end=8", "!pack: 10 elements do not fit a bucket of 8"},
    {"assign f32[2] f32[2]", "f32[2]"},
    {"assign f32[2] f32[3]", "!assign: the new value is f32[3], but must be f32[2]"},
    /* communication */
    {"all_reduce f32[4,6] axes=1", "f32[4,6]"},
    {"reduce_scatter f32[4,6] axes=1 n=2", "f32[2,6]"},
    {"reduce_scatter f32[4,6] axes=1 n=3", "!reduce_scatter: dim 0 of [4,6] does not divide by 3 ranks; 3 or 6 would"},
    {"all_gather f32[4,6] axes=1 n=3", "f32[12,6]"},
    {"all_gather f32[] axes=1 n=3", "!all_gather: a scalar has no dim 0 to cut or join; reshape it first"},
    {"all_to_all f32[4,6] axes=1 n=2", "f32[4,6]"},
    {"all_to_all f32[6,4] axes=1 n=4", "!all_to_all: dim 0 of [6,4] does not divide by 4 ranks; 4 or 8 would"},
    {"broadcast f32[4,6] axes=1", "f32[4,6]"},
    {"shift f32[4,6] axes=1 by=1", "f32[4,6]"},
    /* arity */
    {"add f32[2]", "!add: takes 2 tensors, got 1"},
    {"layer_norm f32[2] f32[2] f32[2] f32[2]", "!layer_norm: takes 1 to 3 tensors, got 4"},
};
enum { NRULES = sizeof rules / sizeof *rules };

static dt_status run_case(dt_graph *g, const op_case *c, char *got, size_t n, dt_err *e) {
  dt_val in[16], out[DT_MAX_OUT];
  dt_build b = dt_build_at(g, DT_FWD);
  b.at.file = "model.lua", b.at.line = 7;
  for (int i = 0; i < c->nin; i++) in[i] = dt_build_leaf(&b, DT_OP_buffer, &c->in[i], NULL);
  DT_TRY(dt_build_node(&b, c->op, in, c->nin, &c->a, out, e));
  const dt_node *node = &g->node.p[g->node.n - 1];
  size_t k = 0;
  got[0] = 0;
  for (int o = 0; o < node->nout; o++) {
    char t[200];
    k += (size_t)snprintf(got + k, n - k, "%s%s", o ? " " : "", dt_type_str(dt_type_of(g, out[o]), t, sizeof t));
  }
  return DT_OK;
}

static void test_rules(void) {
  for (int i = 0; i < NRULES; i++) {
    op_case c;
    dt_graph g;
    dt_err e = {0};
    char got[600];
    const char *want = rules[i][1];
    if (!op_case_parse(rules[i][0], &c)) {
      T_STR(rules[i][0], "a call that parses");
      continue;
    }
    dt_graph_init(&g);
    dt_status st = run_case(&g, &c, got, sizeof got, &e);
    if (*want == '!') {
      if (st != DT_EUSER || !strstr(e.text, want + 1)) T_STR(st ? e.text : got, want);
      T_STR(e.where, "model.lua:7");
      if (!strchr(e.text, ':')) T_STR(e.text, "op: ...");
    } else if (st) {
      T_STR(e.text, want);
    } else {
      T_STR(got, want);
      dt_status v = DT_OK;
      for (g.level = DT_TRACED; g.level < DT_NLEVEL; g.level++) /* accepted at some level: not all ops occur at all */
        if (!(v = dt_verify(&g, &e))) break;
      if (v) T_STR(e.text, "");
    }
    dt_graph_fini(&g);
  }
}

/* each op has a good call above, each rule a bad one */
static void test_rules_complete(void) {
  for (int op = 1; op < DT_NOPS; op++) {
    const dt_op_info *o = dt_op(op);
    bool good = !strcmp(o->shape_name, "shape_given"), refused = good;
    for (int i = 0; i < NRULES; i++) {
      op_case c;
      if (!op_case_parse(rules[i][0], &c)) continue;
      if (c.op == op && rules[i][1][0] != '!') good = true;
      if (!strcmp(dt_op(c.op)->shape_name, o->shape_name) && rules[i][1][0] == '!') refused = true;
    }
    if (!good) T_STR(o->name, "an op with a good call in the table above");
    if (!refused) T_STR(o->shape_name, "a rule with a bad call in the table above");
  }
}

/* ---- promotion: PyTorch's table for tensors with dims, then pairs with a 0-dim one ---- */
static void test_promotion(void) {
  static const char *const torch[DT_NDTYPE] = {
      /* bool u8 i32 i64 f16 bf16 f32 f64 */
      "bool u8 i32 i64 f16 bf16 f32 f64", "u8 u8 i32 i64 f16 bf16 f32 f64",  "i32 i32 i32 i64 f16 bf16 f32 f64",
      "i64 i64 i64 i64 f16 bf16 f32 f64", "f16 f16 f16 f16 f16 f32 f32 f64", "bf16 bf16 bf16 bf16 f32 bf16 f32 f64",
      "f32 f32 f32 f32 f32 f32 f32 f64",  "f64 f64 f64 f64 f64 f64 f64 f64",
  };
  int64_t n = 3;
  for (int a = 0; a < DT_NDTYPE; a++) {
    char row[64], *save = NULL;
    snprintf(row, sizeof row, "%s", torch[a]);
    char *w = strtok_r(row, " ", &save);
    for (int b = 0; b < DT_NDTYPE; b++, w = strtok_r(NULL, " ", &save)) {
      dt_type x = dt_type_make(a, 1, &n), y = dt_type_make(b, 1, &n);
      T_STR(dt_dtype_name(dt_result_dtype((const dt_type *[]){&x, &y}, 2)), w);
      x.nd = y.nd = 0; /* two scalars promote alike */
      T_STR(dt_dtype_name(dt_result_dtype((const dt_type *[]){&x, &y}, 2)), w);
    }
  }
  static const struct {
    int dims, scalar, want;
  } mixed[] = {
      {DT_F32, DT_F64, DT_F32},  {DT_F16, DT_F64, DT_F16},  {DT_BF16, DT_F16, DT_BF16},  {DT_F32, DT_I64, DT_F32},
      {DT_I32, DT_I64, DT_I32},  {DT_U8, DT_I64, DT_U8},    {DT_I32, DT_F64, DT_F64},    {DT_I64, DT_F16, DT_F16},
      {DT_BOOL, DT_I64, DT_I64}, {DT_BOOL, DT_F32, DT_F32}, {DT_BOOL, DT_BOOL, DT_BOOL}, {DT_I64, DT_BOOL, DT_I64},
      {DT_F64, DT_F32, DT_F64},
  };
  for (size_t i = 0; i < sizeof mixed / sizeof *mixed; i++) {
    dt_type x = dt_type_make(mixed[i].dims, 1, &n), y = dt_type_make(mixed[i].scalar, 0, NULL);
    T_STR(dt_dtype_name(dt_result_dtype((const dt_type *[]){&x, &y}, 2)), dt_dtype_name(mixed[i].want));
    T_STR(dt_dtype_name(dt_result_dtype((const dt_type *[]){&y, &x}, 2)), dt_dtype_name(mixed[i].want));
  }
}

/* ---- the table itself ---- */
static void test_table(void) {
  for (int op = 1; op < DT_NOPS; op++) {
    const dt_op_info *o = dt_op(op);
    T_CHECK(dt_op_find(o->name) == op);
    T_CHECK(o->nin_min <= o->nin_max && o->nout >= (op != DT_OP_send) && o->nout <= DT_MAX_OUT);
    T_CHECK((o->flags >> 16 & 255) < 1u << o->nout && OP_STATS_IN_OF(o->flags) < o->nin_max + !o->nin_max);
  }
  T_CHECK(dt_op_find("no_such_op") == DT_OP_none);
  dt_attrs a;
  dt_op_defaults(DT_OP_clamp, &a);
  T_CHECK(isinf(a.clamp.min.f) && a.clamp.min.f < 0 && isinf(a.clamp.max.f) && a.clamp.max.f > 0);
  dt_op_defaults(DT_OP_slice, &a);
  T_CHECK(a.slice.stop == INT64_MAX && a.slice.step == 1);
  dt_op_defaults(DT_OP_conv2d, &a);
  T_CHECK(a.conv2d.stride[0] == 1 && a.conv2d.stride[1] == 1 && a.conv2d.padding[0] == 0);
  T_CHECK(a.conv2d.dilation[1] == 1 && a.conv2d.groups == 1);
  T_CHECK(dt_op_attr(DT_OP_conv2d_bwd_x, "shape")->slot == 7 && dt_op_attr(DT_OP_conv2d_bwd_x, "shape")->required);
  T_CHECK(dt_op_attr(DT_OP_sum, "keepdim")->slot == 9 && !dt_op_attr(DT_OP_sum, "dims")->required);
  T_CHECK(dt_op_attr(DT_OP_one_hot, "dtype")->def[0].i == DT_I64);
  T_CHECK(dt_op_attr(DT_OP_sum, "axis") == NULL);
}

/* ---- views ---- */
static dt_val leaf(dt_graph *g, const char *type, int op, const char *name) {
  dt_type t = {0};
  T_CHECK(type_parse(type, &t));
  dt_build b = dt_build_at(g, DT_FWD);
  return dt_build_leaf(&b, op, &t, name);
}
/* "root+offset:strides" of a value */
static const char *where_is(const dt_graph *g, dt_val v) {
  static char s[200];
  const dt_value *x = &g->val.p[v];
  size_t k = (size_t)snprintf(s, sizeof s, "%d+%lld:", x->root, (long long)x->offset);
  for (int i = 0; i < x->t.nd; i++)
    k += (size_t)snprintf(s + k, sizeof s - k, i ? ",%lld" : "%lld", (long long)x->stride[i]);
  return s;
}
static dt_val op1(dt_graph *g, const char *text, dt_val x) {
  op_case c;
  T_CHECK(op_case_parse(text, &c));
  dt_build b = dt_build_at(g, DT_FWD);
  return dt_build_op(&b, c.op, &x, 1, &c.a);
}

static void test_views(void) {
  dt_graph g;
  dt_graph_init(&g);
  dt_build b = dt_build_at(&g, DT_FWD);
  dt_val x = leaf(&g, "f32[4,6]", DT_OP_input, "x"); /* %0 */
  T_STR(where_is(&g, op1(&g, "reshape shape=[2,2,6]", x)), "0+0:12,6,1");
  dt_val t = op1(&g, "permute dims=[1,0]", x);
  T_STR(where_is(&g, t), "0+0:1,6");
  T_CHECK(!dt_val_contiguous(&g, t));
  T_STR(where_is(&g, op1(&g, "reshape shape=[2,3,4]", t)), "0+0:3,1,6"); /* the 6 may be cut */
  dt_val s = op1(&g, "slice dim=1 start=1 stop=6 step=2", x);
  T_STR(where_is(&g, s), "0+1:6,2");
  T_STR(where_is(&g, op1(&g, "slice dim=0 start=2", s)), "0+13:6,2");
  T_STR(where_is(&g, op1(&g, "broadcast_to shape=[3,4,6]", x)), "0+0:0,6,1");
  T_STR(where_is(&g, op1(&g, "reshape shape=[1,4,1,6]", x)), "0+0:24,6,6,1");
  dt_val p = op1(&g, "split dim=1 sizes=[2,4]", x);
  T_STR(where_is(&g, p), "0+0:6,1");
  T_STR(where_is(&g, p + 1), "0+2:6,1");
  int n = g.node.n;
  dt_val m = op1(&g, "reshape shape=[24]", t); /* no strides can say that: a copy first */
  T_CHECK(g.node.n == n + 2 && g.node.p[n].op == DT_OP_copy && g.node.p[n].reason);
  T_CHECK(dt_val_contiguous(&g, m) && g.val.p[m].root != x);
  n = g.node.n;
  dt_build1(&b, DT_OP_exp, t); /* takes strides */
  T_CHECK(g.node.n == n + 1);
  op1(&g, "softmax", t); /* does not */
  T_CHECK(g.node.n == n + 3 && g.node.p[n + 1].op == DT_OP_copy);
  dt_err e = {0};
  if (dt_verify(&g, &e)) T_STR(e.text, "");
  dt_graph_fini(&g);
}

/* ---- the gradient pass's structure; its numbers are test_ops' matter ---- */
static dt_val param(dt_graph *g, const char *type, const char *name, bool trainable) {
  dt_type t = {0};
  dt_build b = dt_build_at(g, DT_FWD);
  b.at.file = "model.lua", b.at.line = 3;
  T_CHECK(type_parse(type, &t));
  return dt_graph_param(&b, &(dt_param){.name = name, .trainable = trainable}, &t);
}
static int count_ops(const dt_graph *g, int op) {
  int n = 0;
  for (int i = 0; i < g->node.n; i++) n += g->node.p[i].op == op;
  return n;
}
/* x -> linear(w) -> relu -> linear(w, tied) -> mean; another parameter unused, one frozen */
static void build_model(dt_graph *g) {
  dt_graph_init(g);
  g->rows = 4;
  g->mesh = (dt_mesh){.naxes = 1, .name = {"data"}, .size = {2}, .role = {DT_AXIS_SAMPLES}};
  dt_val x = leaf(g, "f32[4,6]", DT_OP_input, "x");
  dt_input in = {.name = "x", .val = x};
  dt_vec_push(&g->input, in);
  dt_val w = param(g, "f32[6,6]", "w", true), f = param(g, "f32[6]", "frozen", false);
  param(g, "f32[6]", "unused", true);
  dt_build b = dt_build_at(g, DT_FWD);
  b.at.file = "model.lua", b.at.line = 10;
  dt_val h = dt_build2(&b, DT_OP_linear, x, w);
  b.at.line = 11;
  h = dt_build2(&b, DT_OP_add, dt_build1(&b, DT_OP_relu, h), f);
  b.at.line = 12;
  h = dt_build2(&b, DT_OP_linear, h, w);
  g->loss = dt_build_reduce(&b, DT_OP_mean, h, 0, NULL, false);
  dt_vec_push(&g->output, g->loss);
}

static void test_grad_pass(void) {
  dt_graph g;
  dt_err e = {0};
  build_model(&g);
  int forward = g.node.n;
  dt_status st = dt_pass_grad(&g, &e);
  if (st) T_STR(e.text, "");
  T_CHECK(g.level == DT_DIFFED);
  T_CHECK(count_ops(&g, DT_OP_accum_grad) == 1);
  T_CHECK(g.param.p[0].grad >= 0 && g.param.p[1].grad == -1 && g.param.p[2].grad == -1);
  const dt_node *a = dt_node_of(&g, g.param.p[0].grad);
  T_CHECK(a->op == DT_OP_accum_grad && a->nin == 2); /* tied: two uses */
  T_CHECK(g.val.p[g.param.p[0].grad].place[0].kind == DT_P);
  T_CHECK(g.stats >= 0 && dt_type_of(&g, g.stats)->dtype == DT_F64 && dt_type_of(&g, g.stats)->dim[0] == 2);
  T_CHECK(g.hyper.n == 1 && g.hyper.p[0].kind == DT_HY_SEED_SCALE);
  /* the input's gradient is of no use to anybody: weight gradients are 2 products, the inner gradient a linear layer */
  T_CHECK(count_ops(&g, DT_OP_matmul) == 2);
  /* what the statistics need is known after forward; all else that was added is backward's */
  bool *told = dt_xalloc((size_t)g.node.n);
  told[g.val.p[g.stats].node] = true;
  for (int i = g.node.n - 1; i >= forward; i--)
    for (int k = 0; told[i] && k < g.node.p[i].nin; k++) told[g.val.p[g.node.p[i].in[k]].node] = true;
  for (int i = forward; i < g.node.n; i++)
    if (!(dt_op(g.node.p[i].op)->flags & OP_LEAF)) T_CHECK(g.node.p[i].phase == (told[i] ? DT_FWD : DT_BWD));
  free(told);
  for (int i = forward; i < g.node.n; i++)
    if (g.node.p[i].op == DT_OP_relu_bwd)
      T_CHECK(g.node.p[i].line == 11 && g.node.p[g.node.p[i].serves].op == DT_OP_relu);
  st = dt_verify(&g, &e);
  if (st) T_STR(e.text, "");
  dt_graph_fini(&g);

  build_model(&g);
  g.plain_grad = true;
  if (dt_pass_grad(&g, &e)) T_STR(e.text, "");
  T_CHECK(g.stats == -1 && g.hyper.n == 0 && g.param.p[0].grad >= 0);
  dt_graph_fini(&g);
}

static void refuses(dt_graph *g, const char *part) {
  dt_err e = {0};
  dt_status st = dt_pass_grad(g, &e);
  if (!st || !strstr(e.text, part)) T_STR(st ? e.text : "no error", part);
  dt_graph_fini(g);
}
static void test_grad_errors(void) {
  dt_graph g;
  dt_build b = dt_build_at(&g, DT_FWD);
  build_model(&g);
  g.loss = -1;
  refuses(&g, "there is no loss");
  build_model(&g);
  g.loss = dt_build1(&b, DT_OP_exp, g.param.p[0].val);
  refuses(&g, "the loss is f32[6,6], but must be a scalar");
  build_model(&g);
  g.loss = dt_build_reduce(&b, DT_OP_mean, g.param.p[1].val, 0, NULL, false); /* frozen */
  refuses(&g, "mean: the loss depends on no trainable parameter");
  build_model(&g);
  dt_val y = dt_build1(&b, DT_OP_layer_norm, g.param.p[0].val);
  g.loss = dt_build_reduce(&b, DT_OP_sum, y + 1, 0, NULL, false); /* the mean that layer_norm returns beside */
  refuses(&g, "layer_norm: the loss needs a gradient through its second or third result");
  build_model(&g);
  g.loss = dt_build_reduce(&b, DT_OP_sum, dt_build2(&b, DT_OP_gelu_bwd, g.param.p[0].val, g.param.p[0].val), 0, NULL,
                           false);
  refuses(&g, "gelu_bwd: the loss needs a gradient through it, and it has none");
  build_model(&g);
  g.loss = dt_build_reduce(&b, DT_OP_mean, dt_build1(&b, DT_OP_stop_gradient, g.param.p[0].val), 0, NULL, false);
  refuses(&g, "depends on no trainable parameter");
}

/* ---- pruning ---- */
static void test_prune(void) {
  dt_graph g;
  build_model(&g);
  dt_build b = dt_build_at(&g, DT_FWD);
  dt_val running = leaf(&g, "f32[6,6]", DT_OP_buffer, "running");
  dt_buf buf = {.name = "running", .val = running};
  dt_vec_push(&g.buf, buf);
  dt_val unused = dt_build1(&b, DT_OP_exp, g.param.p[0].val); /* nobody reads it */
  dt_build1(&b, DT_OP_neg, unused);
  dt_val kept = dt_build1(&b, DT_OP_square, g.param.p[0].val); /* written into the buffer */
  dt_build2(&b, DT_OP_assign, running, kept);
  dt_val last = dt_build1(&b, DT_OP_abs, g.loss);
  dt_vec_push(&g.output, last);
  int n = g.node.n;
  dt_graph_prune(&g, 0);
  T_CHECK(g.node.n == n - 2 && g.val.n == g.node.n);
  T_CHECK(count_ops(&g, DT_OP_exp) == 0 && count_ops(&g, DT_OP_assign) == 1 && count_ops(&g, DT_OP_square) == 1);
  T_CHECK(dt_node_of(&g, g.output.p[1])->op == DT_OP_abs && dt_node_of(&g, g.output.p[1])->in[0] == g.loss);
  dt_err e = {0};
  if (dt_verify(&g, &e)) T_STR(e.text, "");
  dt_graph_fini(&g);
}

/* ---- the verifier ---- */
static dt_nid find(const dt_graph *g, int op) {
  for (int i = 0; i < g->node.n; i++)
    if (g->node.p[i].op == op) return i;
  return -1;
}
static void catches(int fault, const char *part) {
  dt_graph g;
  dt_err e = {0};
  build_model(&g);
  dt_build b = dt_build_at(&g, DT_FWD);
  dt_val t = dt_build_permute(&b, g.param.p[0].val, (int[]){1, 0});
  dt_val soft = dt_build1(&b, DT_OP_softmax, g.param.p[0].val);
  dt_node *linear = &g.node.p[find(&g, DT_OP_linear)], *relu = &g.node.p[find(&g, DT_OP_relu)];
  dt_status st = dt_verify(&g, &e);
  if (st) T_STR(e.text, "");
  switch (fault) {
    case 0: g.val.p[linear->out[0]].t.dim[1] = 7; break;
    case 1: g.val.p[relu->out[0]].t.dtype = DT_F16; break;
    case 2: relu->in[0] = relu->out[0]; break;
    case 3: linear->phase = DT_UPD; break;
    case 4: relu->op = DT_OP_fused; break;
    case 5: linear->nin = 1; break;
    case 6: g.val.p[t].offset = 1; break;
    case 7: g.val.p[t].root = g.val.p[t].root + 1000; break;
    case 8: dt_node_of(&g, soft)->in[0] = t; break;
    case 9: g.param.p[0].grad = 100000; break;
    case 10: g.val.p[relu->out[0]].node = 0; break;
    case 11: g.level = DT_FUSED; break;
    case 12: relu->in[0] = -1; break;
    case 13: g.val.p[soft].root = t; break;
    case 14: relu->op = DT_OP_broadcast; break;
    case 15: linear->a.linear.bias = 1; break;
    default: break;
  }
  st = dt_verify(&g, &e);
  if (st != DT_EBUG || !strstr(e.text, part)) T_STR(st ? e.text : "accepted", part);
  dt_graph_fini(&g);
}
static void test_verifier(void) {
  catches(0, "output 1 is f32[4,7], but must be f32[4,6]");
  catches(1, "output 1 is f16[4,6], but must be f32[4,6]");
  catches(2, "after its user");
  catches(3, "of a later phase");
  catches(4, "may occur from fused to ordered only");
  catches(5, "1 inputs, but takes 2 to 16");
  catches(6, "of its root");
  catches(7, "has no root");
  catches(8, "is not contiguous");
  catches(9, "the list of gradients names no value");
  catches(10, "names another producer");
  catches(11, "part of fused chains by now");
  catches(12, "input 1 is no value");
  catches(13, "is itself a view");
  catches(14, "may occur from placed to ordered only");
  catches(15, "2 inputs, but bias=1 needs 3");
}

/* ---- the printer ---- */
static void test_print(void) {
  dt_graph g;
  build_model(&g);
  dt_str s = {0};
  dt_print(&g, &s);
  T_STR(s.p, "graph traced data=2\n"
             "%0 = input \"x\" f32[4,6] fwd\n"
             "%1 = param \"w\" f32[6,6] fwd model.lua:3\n"
             "%2 = param \"frozen\" f32[6] fwd model.lua:3\n"
             "%3 = param \"unused\" f32[6] fwd model.lua:3\n"
             "%4 = linear %0 %1 f32[4,6] fwd model.lua:10\n"
             "%5 = relu %4 f32[4,6] fwd model.lua:11\n"
             "%6 = add %5 %2 f32[4,6] fwd model.lua:11\n"
             "%7 = linear %6 %1 f32[4,6] fwd model.lua:12\n"
             "%8 = mean %7 f32[] fwd model.lua:12\n"
             "parameter w %1\n"
             "parameter frozen %2 frozen\n"
             "parameter unused %3\n"
             "loss %8\n"
             "output %8\n");
  dt_str_free(&s);
  dt_val x = leaf(&g, "f32[1,1,6,6]", DT_OP_input, NULL), in[2] = {x, x};
  op_case c;
  T_CHECK(op_case_parse("conv2d stride=2 padding=1,0", &c));
  int n = g.node.n;
  dt_build b = dt_build_at(&g, DT_FWD);
  dt_build_op(&b, DT_OP_conv2d, in, 1 + 1, &c.a);
  s = (dt_str){0};
  dt_print(&g, &s);
  T_CHECK(strstr(s.p, "%10 = conv2d %9 %9 {stride=2,2 padding=1,0} f32[1,1,") && n == 10);
  dt_str_free(&s);
  dt_graph_fini(&g);
}

T_BEGIN
T_TEST ("the op table parses and is consistent") test_table();
T_TEST ("shape rules: good and bad calls") test_rules();
T_TEST ("every op has a good call, every rule a bad one") test_rules_complete();
T_TEST ("promotion as in PyTorch") test_promotion();
T_TEST ("views and copies") test_views();
T_TEST ("gradient pass: structure") test_grad_pass();
T_TEST ("gradient pass: refusals") test_grad_errors();
T_TEST ("pruning") test_prune();
T_TEST ("the verifier catches planted faults") test_verifier();
T_TEST ("the printer") test_print();
T_END
