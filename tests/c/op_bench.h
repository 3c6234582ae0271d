/* The calls of ops that tests make, and the graph of one: forward, a loss that is a weighted sum of everything, and gradients. Used by the
 * tests of gradient rules (test_ops.c) and of the CUDA kernels (test_cuda.c). */
#ifndef OP_BENCH_H
#define OP_BENCH_H
#include "interp.h"
#include "op_case.h"
#include "pass/pass.h"

/* A call; how its float inputs are drawn: '+' positive, otherwise both signs, always 0.3 to 1.7 away from 0;
 * tolerance. '0': the derivative is zero by decree, so differences say nothing: only the input's own term C
 * remains. */
static const struct op_test {
  const char *call;
  char draw;
  double tol;
} cases[] = {
    {"add f64[2,3] f64[3]", 0, 1e-7},
    {"add f64[2,1,4] f64[3,1]", 0, 1e-7},
    {"sub f64[3] f64[2,3]", 0, 1e-7},
    {"mul f64[2,3] f64[2,1]", 0, 1e-7},
    {"mul f64[2,3] f64[]", 0, 1e-7},
    {"div f64[2,3] f64[3]", 0, 1e-6},
    {"pow f64[2,3] f64[3]", '+', 1e-6},
    {"minimum f64[2,3] f64[3]", 0, 1e-7},
    {"maximum f64[2,3] f64[3]", 0, 1e-7},
    {"where bool[2,3] f64[3] f64[2,1]", 0, 1e-7},
    {"neg f64[5]", 0, 1e-7},
    {"abs f64[5]", 0, 1e-7},
    {"sign f64[5]", 0, 1e-7},
    {"floor f64[5]", 0, 1e-7},
    {"square f64[5]", 0, 1e-7},
    {"reciprocal f64[5]", 0, 1e-6},
    {"exp f64[5]", 0, 1e-7},
    {"log f64[5]", '+', 1e-7},
    {"sqrt f64[5]", '+', 1e-7},
    {"rsqrt f64[5]", '+', 1e-6},
    {"sin f64[5]", 0, 1e-7},
    {"cos f64[5]", 0, 1e-7},
    {"tanh f64[5]", 0, 1e-7},
    {"sigmoid f64[5]", 0, 1e-7},
    {"erf f64[5]", 0, 1e-7},
    {"relu f64[5]", 0, 1e-7},
    {"gelu f64[5]", 0, 1e-7},
    {"gelu_tanh f64[5]", 0, 1e-7},
    {"silu f64[5]", 0, 1e-7},
    {"softplus f64[5]", 0, 1e-7},
    {"clamp f64[9] min=-0.8 max=0.9", 0, 1e-7},
    {"cast f64[5] dtype=f64", 0, 1e-7},
    {"reshape f64[2,6] shape=[3,-1]", 0, 1e-7},
    {"permute f64[2,3,4] dims=[2,0,1]", 0, 1e-7},
    {"slice f64[3,7] dim=1 start=1 stop=5", 0, 1e-7},
    {"slice f64[2,8,2] dim=1 start=1 stop=8 step=3", 0, 1e-7},
    {"slice f64[7] dim=0 start=2 stop=7 step=2", 0, 1e-7},
    {"broadcast_to f64[3,1] shape=[2,3,4]", 0, 1e-7},
    {"split f64[2,6] dim=1 sizes=[1,2,3]", 0, 1e-7},
    {"stop_gradient f64[3]", '0', 1e-7},
    {"copy f64[2,3]", 0, 1e-7},
    {"concat f64[2,3] f64[2,1] f64[2,2] dim=1", 0, 1e-7},
    {"pad f64[2,3] before=[1,0] after=[0,2] value=0.5", 0, 1e-7},
    {"sum f64[2,3,4] dims=[0,2]", 0, 1e-7},
    {"sum f64[2,3]", 0, 1e-7},
    {"mean f64[2,3,4] dims=[1] keepdim=1", 0, 1e-7},
    {"mean f64[2,3]", 0, 1e-7},
    {"max f64[3,4] dims=[1]", 0, 1e-7},
    {"min f64[3,4] dims=[0] keepdim=1", 0, 1e-7},
    {"max f64[3,4]", 0, 1e-7},
    {"norm f64[3,4] dims=[1]", 0, 1e-7},
    {"norm f64[3,4]", 0, 1e-7},
    {"cumsum f64[3,4] dim=1", 0, 1e-7},
    {"cumsum f64[3,4] dim=0 reverse=1", 0, 1e-7},
    {"softmax f64[3,4]", 0, 1e-7},
    {"softmax f64[3,4,2] dim=1", 0, 1e-7},
    {"log_softmax f64[3,4]", 0, 1e-7},
    {"log_softmax f64[3,4] dim=0", 0, 1e-7},
    {"matmul f64[2,3] f64[3,4]", 0, 1e-7},
    {"matmul f64[3,2] f64[3,4] ta=1", 0, 1e-7},
    {"matmul f64[2,3] f64[4,3] tb=1", 0, 1e-7},
    {"matmul f64[3,2] f64[4,3] ta=1 tb=1", 0, 1e-7},
    {"matmul f64[2,2,3] f64[3,4]", 0, 1e-7},
    {"matmul f64[2,2,3] f64[4,3] tb=1", 0, 1e-7},
    {"matmul f64[2,1,2,3] f64[2,3,4]", 0, 1e-7},
    {"matmul f64[2,3,2] f64[3,4] ta=1", 0, 1e-7},
    {"linear f64[2,2,3] f64[4,3]", 0, 1e-7},
    {"linear f64[2,3] f64[4,3] f64[4] bias=1", 0, 1e-7},
    {"linear f64[3] f64[4,3] f64[4] bias=1", 0, 1e-7},
    {"attention f64[2,2,3,4] f64[2,2,5,4] f64[2,2,5,4]", 0, 1e-6},
    {"attention f64[1,4,5,4] f64[1,2,5,4] f64[1,2,5,4] causal=1", 0, 1e-6},
    {"attention f64[2,3,2,4] f64[2,5,2,4] f64[2,5,2,4] bthd=1 causal=1 scale=0.3", 0, 1e-6},
    {"attention f64[2,2,3,4] f64[2,2,6,4] f64[2,2,6,4] causal=1 offset=-2", 0, 1e-6},
    {"attention f64[2,2,3,4] f64[2,2,6,4] f64[2,2,6,4] causal=1 top_left=1 offset=2", 0, 1e-6},
    {"rotary f64[2,2,3,4] offset=2", 0, 1e-7},
    {"rotary f64[2,3,2,4] bthd=1 theta=100", 0, 1e-7},
    {"embedding i64[2,5] f64[4,3]", 0, 1e-7},
    {"topk f64[3,7] k=3", 0, 1e-7},
    {"gather f64[3,4] i64[3,2]", 0, 1e-7},
    {"gather f64[3,4] i32[2,4] dim=0", 0, 1e-7},
    {"layer_norm f64[3,5] f64[5] f64[5]", 0, 1e-6},
    {"layer_norm f64[2,3,4] f64[3,4] dims=2", 0, 1e-6},
    {"layer_norm f64[3,5]", 0, 1e-6},
    {"rms_norm f64[3,5] f64[5]", 0, 1e-6},
    {"rms_norm f64[2,3,4] dims=2", 0, 1e-6},
    {"batch_norm f64[4,3,2,2] f64[3] f64[3] f64[3] f64[3]", '+', 1e-6},
    {"batch_norm f64[4,3] f64[3] f64[3] f64[3] f64[3] training=0", '+', 1e-6},
    {"conv2d f64[2,2,5,4] f64[3,2,3,2] f64[3] padding=1", 0, 1e-6},
    {"conv2d f64[1,4,6,6] f64[4,2,2,2] stride=2,1 padding=0,1 dilation=2,1 groups=2", 0, 1e-6},
    {"max_pool2d f64[2,2,5,6] kernel=2", 0, 1e-7},
    {"max_pool2d f64[1,2,5,5] kernel=3 stride=2 padding=1", 0, 1e-7},
    {"avg_pool2d f64[2,2,4,6] kernel=2", 0, 1e-7},
    {"avg_pool2d f64[1,2,5,5] kernel=3 stride=2 padding=1 count_include_pad=0", 0, 1e-7},
    {"dropout f64[6,8] p=0.3 key=5", 0, 1e-7},
    {"random f64[6,8] normal=1 key=5", 0, 1e-7},
    {"cross_entropy f64[4,5] i64[4]", 0, 1e-7},
    {"cross_entropy f64[2,3,5] i32[2,3] ignore_index=1 label_smoothing=0.1", 0, 1e-7},
};
enum { NCASES = sizeof cases / sizeof *cases };

static dt_pool *pool;
static uint64_t counter;
static double uniform(void) { /* 0 to 1 */
  uint32_t r[4];
  dt_philox(7, 0, counter++, r);
  return r[0] * 0x1p-32;
}

/* ids stay below this */
static int64_t id_limit(const op_case *c) {
  if (c->op == DT_OP_embedding) return c->in[1].dim[0];
  if (c->op == DT_OP_gather) return c->in[0].dim[c->a.gather.dim < 0 ? c->a.gather.dim + c->in[0].nd : c->a.gather.dim];
  if (c->op == DT_OP_cross_entropy) return c->in[0].dim[c->in[0].nd - 1];
  return 2;
}

/* A differentiable input: a parameter; anything else a buffer. Running statistics of batch_norm are no parameters. */
static bool wants_gradient(const op_case *c, int i) {
  return dt_is_float(c->in[i].dtype) && !(c->op == DT_OP_batch_norm && i > 2);
}

typedef struct bench {
  dt_graph g;
  dt_build build; /* of forward nodes */
  op_case c;
  dt_val in[16];
  dt_nid forward;        /* nodes of the forward graph */
  DT_VEC(dt_val) weight; /* the random R and C */
} bench;

/* sum(v * random constant) */
static dt_val weighted_sum(bench *b, dt_val v) {
  dt_type t = *dt_type_of(&b->g, v);
  dt_val w = dt_build_leaf(&b->build, DT_OP_buffer, &t, NULL);
  dt_vec_push(&b->weight, w);
  return dt_build_reduce(&b->build, DT_OP_sum, dt_build2(&b->build, DT_OP_mul, v, w), 0, NULL, false);
}

static dt_status bench_build(bench *b, const op_case *c, dt_err *e) {
  dt_graph *g = &b->g;
  *b = (bench){.c = *c};
  dt_graph_init(g);
  b->build = dt_build_at(g, DT_FWD);
  g->plain_grad = true;
  dt_val loss = -1, out[DT_MAX_OUT];
  for (int i = 0; i < c->nin; i++) {
    bool p = wants_gradient(c, i);
    b->in[i] = p ? dt_graph_param(&b->build, &(dt_param){.name = "x", .trainable = true}, &c->in[i])
                 : dt_build_leaf(&b->build, DT_OP_buffer, &c->in[i], NULL);
    if (!p) continue;
    dt_val s = weighted_sum(b, b->in[i]);
    loss = loss < 0 ? s : dt_build2(&b->build, DT_OP_add, loss, s);
  }
  DT_TRY(dt_build_node(&b->build, c->op, b->in, c->nin, &c->a, out, e));
  int nout = dt_op(c->op)->flags & (OP_VIEW | OP_GRADS) ? g->node.p[g->node.n - 1].nout : 1;
  for (int o = 0; o < nout; o++)
    if (o != 1)
      loss = dt_build2(&b->build, DT_OP_add, loss,
                       dt_build_cast(&b->build, weighted_sum(b, out[o]),
                                     dt_type_of(g, loss)->dtype)); /* one missing gradient of a split */
  g->loss = loss;
  b->forward = g->node.n;
  DT_TRY(dt_pass_grad(g, e));
  return dt_verify(g, e);
}
static void bench_free(bench *b) {
  dt_vec_free(&b->weight);
  dt_graph_fini(&b->g);
}

static void fill(bench *b, interp *x, char draw) {
  const op_case *c = &b->c;
  for (int i = 0; i < c->nin; i++)
    for (int64_t k = 0; k < dt_numel(&c->in[i]); k++) {
      double u = uniform(), v = 0.3 + 1.4 * uniform();
      if (!dt_is_float(c->in[i].dtype)) v = floor(u * (double)id_limit(c));
      else if (draw != '+' && u < 0.5) v = -v;
      interp_set(x, b->in[i], k, v);
    }
  for (int i = 0; i < b->weight.n; i++)
    for (int64_t k = 0; k < dt_numel(dt_type_of(&b->g, b->weight.p[i])); k++)
      interp_set(x, b->weight.p[i], k, 2 * uniform() - 1);
}
#endif
