-- What public closed forms say of a GPT's memory, beside what is planned: they assume other kernels, which keep other activations.
local formulas = require "dtrain.formulas"
local GPT = require "dtrain.nn.gpt"
local modules = require "dtrain.nn.module"
local util = require "dtrain.util"

local M = {}

--- One line about the first stage of a job in 16 bits whose model is nn.GPT; nil for others.
function M.line(job, micro, replicas)
  local model, p = job.model, job.parallel.p
  if not (modules.is(model) and getmetatable(model).class == GPT) or job.precision == "f32" then return nil end
  local a = model.blocks[1].attn
  local width = a.width
  local o = { layers = model.layers, hidden = width, heads = a.heads, sequence = model.context, micro = micro, tensor = p.tensor,
    pipeline = p.pipeline, chunks = job.parallel:schedule().chunks }
  local f = formulas.transformer(o)
  local held = p.recompute and f.full / (p.sequence and p.tensor or 1) or p.sequence and f.sequence or f.none
  local blocks = 12 * width ^ 2 * model.layers / (p.tensor * p.pipeline)
  local states = blocks * formulas.zero_bytes(p.zero, replicas) / 2 ^ 30
  return ("memory by the closed form: states of the blocks %.4g GiB (Rajbhandari et al. 2020), activations %.4g GiB "
    .. "(Korthikanti et al. 2022)"):format(states, held)
end

return util.strict(M, "closed")
