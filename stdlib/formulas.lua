-- Closed forms of what a training step holds, from public work: to hold a plan against, and to reproduce its tables.
-- What dtrain itself plans (dtrain plan) is exact and its own: it keeps other activations than these assume.
local util = require "dtrain.util"

local F = {}

local GiB = 2 ^ 30

--- Bytes a parameter of mixed-precision Adam on so many data ranks (Rajbhandari et al. 2020): 16-bit parameters and
--- gradients, K bytes of states (12: f32 master copy and two moments). stage 0 is DDP.
function F.zero_bytes(stage, ranks, K)
  K = K or 12
  if stage == 0 then return 2 + 2 + K end
  if stage == 1 then return 4 + K / ranks end
  if stage == 2 then return 2 + (2 + K) / ranks end
  return (4 + K) / ranks
end

--- Elements that a rank sends in a step, in parameters, of ZeRO stage 0 to 3.
function F.zero_volume(stage) return stage == 3 and 3 or 2 end

--- Memory of the first stage of a transformer in GiB (Korthikanti et al. 2022): { states, none, sequence, selective,
--- sequence_selective, full }, the last five by what is recomputed and whether sequences are divided. States: 18 bytes
--- for each of 12 h^2 L / (t p) parameters; activations of 16 bits with dropout masks and the T x T matrix of
--- attention, of as many layers as the first stage holds: L, times 1 + (p - 1) / (p v) when stages are interleaved.
function F.transformer(options)
  local o = util.options("formulas.transformer", options, {
    { "layers", "count", required = true }, { "hidden", "count", required = true },
    { "heads", "count", required = true }, { "sequence", "count", required = true }, { "micro", "count", 1 },
    { "tensor", "count", 1 }, { "pipeline", "count", 1 }, { "chunks", "count", 1 } })
  local s, b, h, a, t = o.sequence, o.micro, o.hidden, o.heads, o.tensor
  local held = o.layers
  if o.chunks > 1 then held = held * (1 + (o.pipeline - 1) / (o.pipeline * o.chunks)) end
  local unit = s * b * h * held / GiB
  local attention = 5 * a * s / h
  return {
    states = 18 * 12 * h ^ 2 * o.layers / (t * o.pipeline) / GiB,
    none = unit * (10 + 24 / t + attention / t),
    sequence = unit / t * (34 + attention),
    selective = unit * (10 + 24 / t),
    sequence_selective = unit / t * 34,
    full = unit * 2,
  }
end

return util.strict(F, "formulas")
