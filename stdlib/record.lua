-- metrics.jsonl in the run's folder: one object a line for each step and each evaluation, whoever drives the engine.
-- Rank 0 only. Lines go to the file together, in one write about once a second, before a checkpoint and at the end, so that each is
-- whole; what a killed run wrote beyond its checkpoint is cut off when it is resumed, so that each step stands once.
local core = require "dtrain.core"
local util = require "dtrain.util"

local Record = {}
Record.__index = Record

local M = {}

-- Bytes of the lines up to a step; a line without its end is none.
local function bytes_until(content, step)
  local at = 1
  while true do
    local last = content:find("\n", at, true)
    local of = last and tonumber(content:sub(at, last):match '^{"step":(%d+)')
    if not of or of > step then return at - 1 end
    at = last + 1
  end
end

--- The record of an engine's run; without a folder (--out) it writes nothing.
function M.new(engine)
  local self = setmetatable({ engine = engine, begin = core.now(), file = engine.metrics }, Record)
  self.flushed = self.begin
  self:back_to(engine.step_number)
  return self
end

--- The run goes on from this step: what was written beyond it is no longer so.
function Record:back_to(step)
  if not self.file then return end
  self.file:flush()
  local content = self.engine.metrics_before
  if self.written then
    local file <close> = assert(io.open(self.engine.out .. "/metrics.jsonl", "rb"))
    content = file:read "a"
  end
  local keep = bytes_until(content, step)
  if keep < #content then self.file:cut(keep) end
  self.written, self.engine.metrics_before = true, nil
end

local order = { "step", "epoch", "loss", "lr", "grad_norm", "tokens_per_second", "samples_per_second", "step_ms",
  "seconds" }

--- Puts what waits into the file. A full disk is told once; the lines wait for the next time.
function Record:flush()
  if not self.file then return end
  local ok, message = self.file:flush()
  if not ok and not self.told then io.stderr:write("warning: ", message, "; the lines are kept and tried again\n") end
  self.told, self.flushed = not ok, core.now()
end

local function write(self, line, now)
  self.file:add(util.json(line, order) .. "\n")
  if now - self.flushed > 1 then self:flush() end
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
  self:flush()
end

return M
