-- metrics.jsonl in the run's folder: one object a line for each step and each evaluation, whoever drives the engine.
-- Rank 0 only; flushed about once a second and when the process ends.
local core = require "dtrain.core"
local util = require "dtrain.util"

local Record = {}
Record.__index = Record

local M = {}

--- The record of an engine's run; without a folder (--out) it writes nothing.
function M.new(engine)
  local self = setmetatable({ engine = engine, begin = core.now() }, Record)
  if not engine.out or core.rank() ~= 0 then return self end
  core.mkdir_p(engine.out)
  local path = engine.out .. "/metrics.jsonl"
  local file, message = io.open(path, engine.resumed and "a" or "w")
  if not file then error(("cannot write %s: %s; choose another --out"):format(path, message), 0) end
  self.file, self.flushed = file, self.begin
  return self
end

local order = { "step", "epoch", "loss", "lr", "grad_norm", "tokens_per_second", "samples_per_second", "step_ms",
  "seconds" }

local function write(self, line, now)
  self.file:write(util.json(line, order), "\n")
  if now - self.flushed > 1 then
    self.file:flush()
    self.flushed = now
  end
end

--- After a step; m is what engine:step returns.
function Record:step(m)
  if not self.file then return end
  local now = core.now()
  local line = { step = self.engine.step_number, epoch = m.epoch, loss = m.loss, lr = m.lr, step_ms = m.seconds * 1e3,
    seconds = now - self.begin, tokens_per_second = m.tokens_per_second, samples_per_second = m.samples_per_second }
  if m.grad_norm and m.grad_norm >= 0 then line.grad_norm = m.grad_norm end
  if m.skipped then line.skipped, line.loss_scale = true, m.loss_scale end
  write(self, line, now)
end

--- After an evaluation: values by metric name, as eval_<name>.
function Record:eval(values)
  if not self.file then return end
  local now = core.now()
  local line = { step = self.engine.step_number, seconds = now - self.begin }
  for name, v in util.sorted(values) do line["eval_" .. name] = v end
  write(self, line, now)
  self.file:flush()
end

return M
